"""The chat in a browser: `edge-llm chat --web`."""
