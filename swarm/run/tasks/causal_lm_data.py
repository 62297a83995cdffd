"""Samples of the task `causal-lm`: tokens of documents, divided among the peers of an epoch.

Shape suffixes: B samples, L tokens of a sample.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch

from swarm.core.errors import UsageError
from swarm.run.tasks.documents import Documents

if TYPE_CHECKING:
    from swarm.run.task import Draw
    from swarm.run.tasks.causal_lm import LanguageModelSettings

_HELD_OUT_PART = 20  # one document in 20 is held out, by the hash of its text
_VALIDATION_SAMPLES = 16
_VALIDATION_BATCH = 4
_BLOCKS_MAX = 4096  # parts of the data that are divided among peers
_TOKENIZED_AT_ONCE = 64  # documents
_WRITTEN_TOKENS = 32
_IGNORED = -100  # the label of padding, as in transformers
_PERPLEXITY_MAX = 1e9


class TextData:
    """Samples of L tokens, as int32 on the host; batches are copied to the device.

    `training` holds all training samples, `share` the indices of this peer's samples in this epoch.
    """

    def __init__(
        self, documents: Documents, tokenizer: Any, settings: LanguageModelSettings, device: torch.device
    ) -> None:
        """Raise UsageError if the documents are too short for two samples."""
        self._tokenizer, self._settings, self._device = tokenizer, settings, device
        training, held_out = self._samples(documents.texts)
        if not len(held_out) and len(training) > 1:  # the hash held out no document
            cut = max(1, len(training) // _HELD_OUT_PART)
            training, held_out = training[:-cut], training[-cut:]
        if not len(training) or not len(held_out):
            raise UsageError(
                f"{documents.source} has too little text for samples of {settings.sequence_length} tokens: "
                "give --data a folder with more"
            )
        self.training = training
        places = torch.linspace(0, len(held_out) - 1, min(_VALIDATION_SAMPLES, len(held_out))).long()
        self._held_out = held_out[places]
        self._generator = torch.Generator()
        self.share, self._place = torch.arange(len(training)), 0
        self._written_epoch = -settings.sample_every_epochs
        self.summary = (
            f"{documents.source}: {len(documents.texts):,} documents, {len(training):,} samples to train on, "
            f"{len(held_out):,} held out"
        )

    def _samples(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return samples to train on and held out, int32 [samples, L] with `_IGNORED` as padding."""
        length, end = self._settings.sequence_length, self._tokenizer.eos_token_id
        ending = [] if end is None else [end]
        parts: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        for first in range(0, len(texts), _TOKENIZED_AT_ONCE):
            some = texts[first : first + _TOKENIZED_AT_ONCE]
            encoded = self._tokenizer(some, add_special_tokens=False, return_attention_mask=False)[
                "input_ids"
            ]
            for text, tokens in zip(some, encoded, strict=True):
                document = torch.tensor([*tokens, *ending], dtype=torch.int32)
                if not self._settings.packing:
                    document = document[:length]
                    padding = length - len(document)
                    document = torch.nn.functional.pad(document, (0, padding), value=_IGNORED)
                parts[_is_held_out(text)].append(document)
        empty = torch.empty(0, dtype=torch.int32)
        whole = [torch.cat(parts[held_out] or [empty]) for held_out in (False, True)]
        training, held_out = (one[: len(one) // length * length].view(-1, length) for one in whole)
        return training, held_out

    def start_epoch(self, draw: Draw) -> None:
        """Take this peer's share of the samples. Peers that know each other take disjoint shares by
        rendezvous hashing: each block goes to the peer with the highest hash for it. A peer that joins or
        leaves therefore moves only its own blocks.
        """
        blocks = min(_BLOCKS_MAX, len(self.training))
        own = torch.rand(blocks, generator=torch.Generator().manual_seed(draw.seed))
        highest = torch.ones(blocks, dtype=torch.bool)
        for seed in draw.other_seeds:
            highest &= own > torch.rand(blocks, generator=torch.Generator().manual_seed(seed))
        samples = torch.arange(len(self.training))
        mine = samples[highest[samples % blocks]]
        self._generator.manual_seed(draw.seed)
        self.share = self._shuffled(mine if len(mine) else samples)
        self._place = 0

    def _shuffled(self, samples: torch.Tensor) -> torch.Tensor:
        return samples[torch.randperm(len(samples), generator=self._generator)]

    def next_samples(self, count: int) -> torch.Tensor:
        """Return the indices of the next samples of this peer's share, which starts over after the last."""
        taken: list[torch.Tensor] = []
        while count:
            if self._place == len(self.share):
                self.share, self._place = self._shuffled(self.share), 0
            some = self.share[self._place : self._place + count]
            taken.append(some)
            self._place += len(some)
            count -= len(some)
        return torch.cat(taken)

    def loss(self, model: torch.nn.Module, samples: int) -> torch.Tensor:
        return self._loss(model, self.training[self.next_samples(samples)])

    @torch.no_grad()
    def validation_loss(self, model: torch.nn.Module) -> float:
        total = 0.0
        for batch in torch.split(self._held_out, _VALIDATION_BATCH):
            total += self._loss(model, batch).item() * len(batch)
        return total / len(self._held_out)

    def metrics(self, validation_loss: float) -> dict[str, float]:
        """Return the perplexity."""
        if math.isnan(validation_loss):
            return {}
        return {"perplexity": min(math.exp(min(validation_loss, 50.0)), _PERPLEXITY_MAX)}

    def _loss(self, model: torch.nn.Module, samples_BL: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy in nats per token."""
        labels_BL = samples_BL.long().to(self._device)
        # Padding comes last and attention is causal, so no mask is needed.
        with self._precision():
            loss: torch.Tensor = model(input_ids=labels_BL.clamp(min=0), labels=labels_BL).loss
        return loss.float()

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        chosen, kind = self._settings.precision, self._device.type
        if chosen == "auto":
            chosen = "bfloat16" if kind == "cuda" and torch.cuda.is_bf16_supported() else "float32"
        return torch.autocast(kind, torch.bfloat16) if chosen == "bfloat16" else contextlib.nullcontext()

    @torch.no_grad()
    def write_sample(self, model: torch.nn.Module, epoch: int) -> str:
        """Return the model's continuation of the prompt; empty in most epochs."""
        every = self._settings.sample_every_epochs
        if not every or epoch - self._written_epoch < every:
            return ""
        self._written_epoch = epoch
        prompt = self._tokenizer(self._settings.prompt, return_tensors="pt")["input_ids"].to(self._device)
        generate: Any = model.generate
        with self._precision():
            tokens = generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=_WRITTEN_TOKENS,
                do_sample=False,
                pad_token_id=self._tokenizer.eos_token_id or 0,
            )
        return str(self._tokenizer.decode(tokens[0], skip_special_tokens=True)).rstrip()


def _is_held_out(text: str) -> bool:
    """Return whether a document is held out. Only its text decides, so that all volunteers agree."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()[0] % _HELD_OUT_PART == 0
