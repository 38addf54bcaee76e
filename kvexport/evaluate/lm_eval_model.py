"""A model class for lm-evaluation-harness that runs an artifact. After its import, ``model="kvexport"`` names it.

    lm_eval.simple_evaluate(model=KvexportLM("artifacts/tiny-keepkv"), tasks=[...])

It works offline and needs kvexport's extra `eval`. A context is read in chunks and its continuation token by token, as
a deployed engine would do, so scores are those of the compressed KV cache. Chat templates are not covered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from kvexport.engine.load import load
from kvexport.errors import UsageError
from kvexport.evaluate.measure import counted_logits
from kvexport.evaluate.reference import log_softmax
from kvexport.evaluate.tasks import Sample

NEW_TOKENS = 256  # the most tokens of an answer if a task sets no limit; the harness's own models use the same


@register_model("kvexport")
class KvexportLM(LM):  # type: ignore[misc]
    def __init__(
        self, artifact: str | Path, batch_size: int | str | None = None, threads: int | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.engine = load(artifact, threads=threads)
        if self.engine.tokenizer is None:
            raise UsageError(f"{artifact} has no tokenizer.json", "put it beside the checkpoint and build again")
        self._encode = self.engine.tokenizer.encode
        size = str(batch_size)  # the harness also says "auto"
        self.batch = min(int(size), self.engine.max_batch) if size.isdigit() else self.engine.max_batch
        # A token before the first token of a text, so that the first token can be predicted too.
        start = self._encode("") or [self.engine.generation_config.get("eos_token_id", 0)]
        self._start: list[int] = start[0] if isinstance(start[0], list) else start

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the ln p of every continuation after its context, in nats, and whether greedy decoding gives it."""
        return list(self._score([self._pair(*request.args) for request in requests]))

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-probability of every text in nats.

        A text longer than the artifact's max_length is cut into independent pieces.
        """
        room = self.engine.max_length - 1
        totals = []
        for request in requests:
            ids = self._encode(request.args[0], add_special_tokens=False)
            pieces = [self._start[:1] + ids[i : i + room] for i in range(0, len(ids), room)]
            prompts = [len(piece) if self.engine.model.all_logits else 1 for piece in pieces]
            samples = [
                Sample(piece, prompt, list(range(len(piece) - 1)))
                for piece, prompt in zip(pieces, prompts, strict=True)
            ]
            totals.append(sum(score for score, _ in self._score(samples)))
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Generate a continuation of every context up to a stop string: greedy, or sampled if the request asks for it.

        If a context leaves no room for an answer, its beginning is removed.
        """
        texts: list[str] = []
        for request in requests:
            context, arguments = request.args
            stops = arguments.get("until") or []
            new = min(int(arguments.get("max_gen_toks", NEW_TOKENS)), self.engine.max_length - 1)
            drawn = (
                {name: arguments[name] for name in ("temperature", "top_p", "top_k") if arguments.get(name)}
                if arguments.get("do_sample")
                else {}
            )
            prompt = self._encode(context)[-(self.engine.max_length - new) :]
            stop = [stops] if isinstance(stops, str) else list(stops)
            settings = {"max_new_tokens": new, "stop_strings": stop or None, "do_sample": bool(drawn), **drawn}
            texts.append(self.engine.generate([prompt or self._start], **settings)[0].text)
        return texts

    def _pair(self, context: str, continuation: str) -> Sample:
        """Return a sample with the token ids of a context and its continuation.

        Spaces at the end of the context are moved to the beginning of the continuation before the text is encoded.
        """
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        before = self._encode(context) if context else self._start
        whole = (
            self._encode(context + continuation)
            if context
            else [*self._start, *self._encode(continuation, add_special_tokens=False)]
        )
        answer = whole[len(before) :][: self.engine.max_length - 1]
        before = before[-(self.engine.max_length - len(answer)) :]
        return Sample([*before, *answer], len(before), list(range(len(before) - 1, len(before) + len(answer) - 1)))

    def _score(self, samples: Sequence[Sample]) -> Iterator[tuple[float, bool]]:
        for start in range(0, len(samples), self.batch):
            batch = samples[start : start + self.batch]
            for sample, logits in zip(batch, counted_logits(self.engine, batch), strict=True):
                truth = [sample.ids[p + 1] for p in sample.counted]
                logs = log_softmax(logits)
                yield float(logs[range(len(truth)), truth].sum()), bool((logits.argmax(-1) == truth).all())
