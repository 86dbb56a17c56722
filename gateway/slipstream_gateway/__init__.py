"""Answer OpenAI's and Anthropic's HTTP requests with the engine of a model repository."""
