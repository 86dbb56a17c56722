"""Mistral Small 3.1 and Ministral 3 (Mistral AI, 2025), as published: with a tower for images."""

from slipstream.models.wrapped import Whole, wraps

TEXTS = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}

wraps("Mistral3ForConditionalGeneration", Whole("mistral3", TEXTS, ties=True))
