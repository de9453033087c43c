"""Batches from token streams.

Owns which tokens a microbatch has. Invariants: the sequences of a microbatch are a function of
(seed, replica, microbatch) alone, so any process can ask for any of them in any order, and a
resumed run continues where it stopped without a saved position; validation is the same in every
run over the same stream; a held-out tenth is never touched by training. A sequence is context + 1
tokens: the input is all but the last, the target all but the first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncmesh.config import Config
from asyncmesh.data.sources import Kind, Tokens, TokenStream, load_source
from asyncmesh.errors import ConfigError

Batch = tuple[Tensor, Tensor]

_VALIDATION_BATCH = 8  # at least: without gradients there is room, and fewer calls are quicker
HELD_OUT_SHARE = 10  # the last tenth of the source is for validation if no file is given


class Batches:
    """Random sequences, anywhere in the training stream: `batches(replica, microbatch)`."""

    def __init__(self, tokens: Tokens, seed: int, microbatch_size: int, context: int) -> None:
        _require_one_sequence(len(tokens), context, "training")
        self.tokens, self.seed = tokens, seed
        self.microbatch_size, self.context = microbatch_size, context

    def __call__(self, replica: int, microbatch: int) -> Batch:
        """Input and target (B, T), int64."""
        # Philox is a function of key and counter: nothing is drawn in vain to reach a microbatch,
        # and the highest word of the counter is never reached by counting within one.
        philox = np.random.Philox(
            key=np.array([self.seed % 2**64, replica], dtype=np.uint64),
            counter=np.array([0, 0, 0, microbatch], dtype=np.uint64),
        )
        # Raw words, because numpy keeps those the same in all its versions, and Generator not.
        # The remainder's favour for low offsets is below 2^-30 for any stream that fits a disk.
        words = philox.random_raw(self.microbatch_size)
        offsets = words % np.uint64(len(self.tokens) - self.context)
        return _batch(self.tokens, offsets.tolist(), self.context)


@dataclass(frozen=True, eq=False)
class Dataset:
    """All that training needs to know of its data."""

    batches: Batches
    validation: list[Batch]
    vocab: int
    kind: Kind
    train_tokens: int
    validation_tokens: int

    def digest(self) -> str:
        """Of all that is drawn from: equal digests mean equal batches."""
        found = hashlib.blake2b(f"{self.kind}/{self.vocab}".encode(), digest_size=16)
        found.update(np.ascontiguousarray(self.batches.tokens).data)
        for x, target in self.validation:
            found.update(x.numpy().data)
            found.update(target.numpy().data)
        return found.hexdigest()


def validation_batches(tokens: Tokens, sequences: int, batch: int, context: int) -> list[Batch]:
    """Sequences that lie evenly over the stream and never overlap, in batches of at most `batch`.

    Which sequences depends on neither `batch` nor the microbatch size, so runs that differ in those
    are validated on the same text. A short stream has fewer.
    """
    _require_one_sequence(len(tokens), context, "validation")
    count = min(sequences, len(tokens) // (context + 1))
    # Neighbours are at least floor(length / count) >= context + 1 tokens apart.
    offsets = [i * len(tokens) // count for i in range(count)]
    return [_batch(tokens, offsets[i : i + batch], context) for i in range(0, count, batch)]


def open_data(config: Config) -> Dataset:
    """The streams that `config.data` names, checked against the model that will read them."""
    source = load_source(config.data.source)
    if config.data.validation is None:
        train_tokens = len(source.tokens) - len(source.tokens) // HELD_OUT_SHARE
        train, validation = source.tokens[:train_tokens], source.tokens[train_tokens:]
        streams = {"data.source": source}
    else:
        other = load_source(config.data.validation, "data.validation")
        train, validation = source.tokens, other.tokens
        streams = {"data.source": source, "data.validation": other}
        _require_same_kind(source, other)
    vocab = config.model.vocab or source.needed_vocab
    for setting, stream in streams.items():
        _require_vocab(vocab, setting, stream)
    size, context = config.pipeline.microbatch_size, config.model.context
    return Dataset(
        batches=Batches(train, config.seed, size, context),
        validation=validation_batches(
            validation, config.train.eval_sequences, max(size, _VALIDATION_BATCH), context
        ),
        vocab=vocab,
        kind=source.kind,
        train_tokens=len(train),
        validation_tokens=len(validation),
    )


def _batch(tokens: Tokens, offsets: Sequence[int], context: int) -> Batch:
    rows = np.stack([tokens[offset : offset + context + 1] for offset in offsets])
    sequences = torch.from_numpy(rows.astype(np.int64))
    return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()


def _require_one_sequence(tokens: int, context: int, use: str) -> None:
    if tokens <= context:
        shorter = f"try model.context={tokens - 1}, or " if tokens > 1 else ""
        raise ConfigError(
            "model.context",
            context,
            f"a sequence is context + 1 tokens, but the {use} stream has only {tokens}",
            f"{shorter}give a longer {use} stream",
        )


def _require_same_kind(source: TokenStream, validation: TokenStream) -> None:
    if validation.kind != source.kind:
        raise ConfigError(
            "data.validation",
            validation.name,
            f'holds tokens of kind {validation.kind}, but data.source = "{source.name}" of kind'
            f" {source.kind}",
            "give two files of one kind",
        )


def _require_vocab(vocab: int, setting: str, stream: TokenStream) -> None:
    if vocab <= stream.highest:
        raise ConfigError(
            "model.vocab",
            vocab,
            f'{setting} = "{stream.name}" holds the token id {stream.highest}',
            f"try model.vocab={max(stream.needed_vocab, stream.highest + 1)}",
        )
