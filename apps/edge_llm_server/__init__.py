"""A private HTTP server over the engine, in the words of OpenAI's API, llama-server's and Ollama's. Needs extra `server`."""
