"""A server: completions and sessions over HTTP, and a page."""
