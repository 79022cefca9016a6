"""Errors that are for the user to correct."""


class UserError(ValueError):
    """Bad input: a setting, a file, an argument. Its message is one line that says what is wrong and what to do.

    Commands print the message alone. Every other exception is taken for a defect, whose traceback is kept.
    """


class ArgumentError(UserError):
    """A wrong argument of library code. `config.arguments` says it as one of a setting or a flag.

    Args:
        argument: the argument's name.
        said: the fault and the remedy. Other arguments are in back quotes.
        given: follows the name: a part of the argument, ".size", or what it holds, " (data=2)".
    """

    def __init__(self, argument: str, said: str, given: str = "") -> None:
        super().__init__(argument, said, given)
        self.argument, self.said, self.given = argument, said, given

    def __str__(self) -> str:
        return f"{self.argument}{self.given}: {self.said}"


class EngineError(RuntimeError):
    """The engine gave something that must not be trained on, or broke."""


def one_line(text: object, limit: int | None = None) -> str:
    """A text, or an error's message, on one line, cut to `limit` characters."""
    return " ".join(str(text).split())[:limit]
