"""`kvmem serve`: an endpoint that clients of llama-server, OpenAI and Anthropic can use as it is."""
