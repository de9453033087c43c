"""Token streams: where they are read from.

Owns the formats. `builtin` is text that comes with Python itself (the help topics of pydoc; their
size differs between Python versions); `.u16` and `.u16.xz` hold little-endian 16-bit GPT-2 token
ids; any other file is a stream of its bytes. Invariants: a stream has at least two tokens (one to
read, one to predict) and is never copied when it lies uncompressed in a file.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from asyncmesh.errors import InputFileError

Kind = Literal["bytes", "gpt2"]
Tokens = NDArray[np.uint8] | NDArray[np.uint16]

BUILTIN = "builtin"
BYTES_VOCAB = 256
GPT2_VOCAB = 50_257


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Tokens in their order; `name` is what the user called them."""

    tokens: Tokens
    kind: Kind
    name: str

    @cached_property
    def highest(self) -> int:
        """The highest token id there is. Reads the whole stream, once."""
        return int(self.tokens.max())

    @property
    def needed_vocab(self) -> int:
        """Token ids that the kind of stream defines."""
        return BYTES_VOCAB if self.kind == "bytes" else GPT2_VOCAB


def kind_of(name: str) -> Kind:
    """What a source holds, told from its name alone."""
    return "gpt2" if name.endswith((".u16", ".u16.xz")) else "bytes"


def load_source(name: str, setting: str = "data.source") -> TokenStream:
    """The stream that `setting` calls `name`; what is wrong with it is told in one line."""
    if name == BUILTIN:
        text = "\n".join(topics[key] for key in sorted(topics))
        return TokenStream(np.frombuffer(text.encode("utf-8"), dtype=np.uint8), "bytes", name)
    kind = kind_of(name)
    try:
        tokens = _read(_expanded(name), kind)
    except _UnusableError as problem:
        raise InputFileError(f'{setting} = "{name}": {problem}') from None
    except OSError as error:
        reason = (error.strerror or "cannot be read").lower()
        raise InputFileError(f'{setting} = "{name}": {reason}; give a readable file') from None
    return TokenStream(tokens, kind, name)


def modified_s(name: str) -> float:
    """When a source's file last changed; 0 for the built-in text and for a file that is gone."""
    try:
        return 0.0 if name == BUILTIN else _expanded(name).stat().st_mtime
    except (OSError, _UnusableError):
        return 0.0


class _UnusableError(Exception):
    """A file that is no token stream: `rule; fix`."""


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise _UnusableError("names a home folder that does not exist; give a path") from None


def _read(path: Path, kind: Kind) -> Tokens:
    if not path.exists():
        raise _UnusableError(f'there is no such file; give a path that exists, or "{BUILTIN}"')
    if not path.is_file():
        raise _UnusableError("must be a file, not a directory or a device; give one file in it")
    if path.suffix == ".xz" and kind == "gpt2":
        content = np.frombuffer(_decompressed(path), dtype=np.uint8)
    elif path.stat().st_size == 0:  # which cannot be mapped
        content = np.empty(0, dtype=np.uint8)
    else:
        content = np.memmap(path, dtype=np.uint8, mode="r")
    if kind == "gpt2" and content.size % 2:
        raise _UnusableError(
            f"must hold 16-bit tokens, but has an odd number of bytes ({content.size});"
            " write it again, or give text under another ending than .u16"
        )
    tokens: Tokens = content.view("<u2") if kind == "gpt2" else content
    if len(tokens) < 2:
        raise _UnusableError(
            f"must hold at least 2 tokens, but has {len(tokens)}; give a longer file"
        )
    return tokens


def _decompressed(path: Path) -> bytes:
    try:
        with lzma.open(path) as file:
            return file.read()
    except (lzma.LZMAError, EOFError):
        raise _UnusableError("is not a whole xz file; compress it again with `xz`") from None
