"""Read and write each HTTP schema: chat completions, completions, responses, messages."""
