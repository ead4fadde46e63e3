"""Many requests from a file in OpenAI's batch format: answered once each, whatever happens in between."""
