"""Inference engines: the protocol, the embedded engine, vLLM as a sidecar, a server over HTTP."""
