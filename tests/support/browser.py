"""A page in a real browser without a window, at a given width."""

import html
import json
import re
import shutil
import subprocess

from tests.support.waiting import HANGS_S

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
_FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-component-update
    --disable-background-networking --disable-sync --allow-file-access-from-files --enable-logging=stderr
    --virtual-time-budget=4000 --dump-dom
""".split()


def look_at(page, tmp_path, width, first="", more="null"):
    """(facts of the page laid out at that width, what the browser's console says).

    JavaScript with the page's document as `d`: `first` runs before the facts are taken, `more` is
    one of them.
    """
    frame = tmp_path / f"frame{width}.html"
    frame.write_text(
        f'<iframe id="f" src="file://{page}" style="width:{width}px;height:800px;border:0"></iframe><pre id="r"></pre>'
        "<script>addEventListener('load', () => setTimeout(() => { const d = document.getElementById('f')"
        f".contentDocument, e = d.documentElement; {first}; setTimeout(() => {{"
        "document.getElementById('r').textContent = JSON.stringify({"
        "wide: e.scrollWidth,"
        "figures: [...d.querySelectorAll('figure')].filter(f => {"
        "const s = [...f.querySelectorAll('svg')]; return s.length && s.every(one => one.clientWidth > 100); }).length,"
        f"shown: d.querySelectorAll('.completion').length, more: {more}}}); }}, 500); }}, 1000));</script>"
    )
    done = subprocess.run(
        [
            CHROMIUM,
            *_FLAGS,
            f"--user-data-dir={tmp_path}/profile{width}",
            "--window-size=1400,900",
            f"file://{frame}",
        ],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    found = re.search(r'<pre id="r">(.*?)</pre>', done.stdout, re.S)
    assert found and found[1], done.stderr[-2000:]
    return json.loads(html.unescape(found[1])), [
        line for line in done.stderr.splitlines() if "CONSOLE" in line
    ]
