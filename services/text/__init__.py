"""Ids, bytes and text, purely: what the detokenizer streams with, and the tokenizer answers Detokenize with."""
