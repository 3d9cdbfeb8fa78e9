"""A model directory of a few kilobytes: one id per byte, BOS, end-of-text, and a chat template that can say no."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS = "<s>", "</s>"
CONTEXT_LENGTH = 512

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role: ' + message['role']) }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tiny_model(directory: Path, *, with_template: bool = True) -> Path:
    """Writes the model's files (no weights) and returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(directory / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    config = {"vocab_size": vocab_size, "max_position_embeddings": CONTEXT_LENGTH, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": {"content": EOS}}))
    if with_template:
        (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def _tokenizer() -> Tokenizer:
    """Ids 0 and 1 are BOS and end-of-text; the others are one byte each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {BOS: 0, EOS: 1} | {piece: index + 2 for index, piece in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer
