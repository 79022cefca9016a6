"""Inference engines: the protocol, the embedded engine, vLLM in its own process, an HTTP server."""
