"""Read llama.cpp's GGUF files: configuration, tensors and tokenizer out of one file."""
