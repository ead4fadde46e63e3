"""The chat in a terminal, as a full screen: `edge-llm chat`."""
