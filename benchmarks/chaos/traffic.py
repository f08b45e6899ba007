"""Requests to a server, and whether their answers are the ones that they should get.

Every answer is held against the one that the same prompt got alone. An answer that differs is
wrong, unless the two best logits of the reference were closer than 1e-4 where it begins to differ.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field

import numpy as np
from openai import AsyncOpenAI, OpenAIError

CLOSE_LOGITS = 1e-4


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a prompt gets alone.

    Args:
        prompt: The user's message.
        max_tokens: Where its answer ends.
        tokens: Its answer, token by token.
        gaps: Between the best and the second-best logit at each token.
    """

    prompt: str
    max_tokens: int
    tokens: list[str]
    gaps: list[float]


@dataclass(kw_only=True)
class Outcome:
    """What became of the requests of one run; times since its begin."""

    first_s: list[tuple[float, float]] = field(default_factory=list)
    """(arrival, time to first token)"""
    per_token_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    same: int = 0
    close_calls: int = 0
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0

    def figures(self) -> dict:
        """For the report."""
        return {
            "requests": self.same + self.close_calls + len(self.wrong) + len(self.failures),
            "tokens": self.tokens,
            "failed": len(self.failures),
            "same": self.same,
            "differ_at_a_close_call": self.close_calls,
            "wrong": len(self.wrong),
            "ttft_s": _tail([seconds for _, seconds in self.first_s]),
            "tpot_s": _tail(self.per_token_s),
            "examples": (self.failures + self.wrong)[:5],
        }


def _tail(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    tail = {f"p{q}": round(float(np.percentile(values, q)), 4) for q in (50, 90, 99)}
    return tail | {"max": round(max(values), 4)}


class Traffic:
    """A client of one server.

    Args:
        url: The server's.
        timeout_s: When a request that is not answered has failed.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._client = AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=timeout_s, max_retries=0
        )
        self._model = ""
        self.references: list[Reference] = []

    async def close(self) -> None:
        """Hang up."""
        await self._client.close()

    async def ask_alone(self, prompts: list[str], max_tokens: int) -> None:
        """Get the answers that all later ones are held against, one at a time."""
        self._model = (await self._client.models.list()).data[0].id
        for number, prompt in enumerate(prompts):
            length = max(2, max_tokens * (1 + number % 3) // 2)  # half, once and one and a half
            answer = await self._client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=length,
                temperature=0,
                logprobs=True,
                top_logprobs=2,
            )
            content = answer.choices[0].logprobs.content
            gaps = [abs(c.top_logprobs[0].logprob - c.top_logprobs[1].logprob) for c in content]
            tokens = [c.token for c in content]
            self.references.append(
                Reference(prompt=prompt, max_tokens=length, tokens=tokens, gaps=gaps)
            )

    async def run(self, at_s: list[float], seed: int) -> Outcome:
        """Send requests at their times, whatever has become of the earlier ones."""
        outcome, chance, began_s = Outcome(), random.Random(seed), time.monotonic()
        running = []
        for when_s in at_s:
            await asyncio.sleep(max(0.0, began_s + when_s - time.monotonic()))
            known = chance.choice(self.references)
            running.append(asyncio.create_task(self._ask(known, outcome, when_s)))
        await asyncio.gather(*running)
        return outcome

    async def run_all_at_once(self, times: int, *, copies: int = 1) -> Outcome:
        """Every prompt, the same requests each time: so that memory can be compared."""
        outcome = Outcome()
        for _ in range(times):
            known = self.references * copies
            await asyncio.gather(*(self._ask(each, outcome, 0.0) for each in known))
        return outcome

    async def _ask(self, known: Reference, out: Outcome, arrival_s: float) -> None:
        """One streamed request, judged."""
        began_s, first_s, tokens = time.perf_counter(), 0.0, []
        try:
            stream = await self._client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": known.prompt}],
                max_tokens=known.max_tokens,
                temperature=0,
                logprobs=True,
                stream=True,
            )
            async for chunk in stream:
                if not chunk.choices or chunk.choices[0].logprobs is None:
                    continue
                first_s = first_s or time.perf_counter() - began_s
                tokens += [c.token for c in chunk.choices[0].logprobs.content or []]
        except (OpenAIError, OSError) as error:
            out.failures.append(f"{type(error).__name__}: {error}"[:200])
            return
        seconds = time.perf_counter() - began_s
        out.tokens += len(tokens)
        out.first_s.append((arrival_s, first_s))
        if len(tokens) > 1:
            out.per_token_s.append((seconds - first_s) / (len(tokens) - 1))
        judge(known, tokens, out)


def judge(known: Reference, tokens: list[str], out: Outcome) -> None:
    """Count an answer as what it is: the same, different at a close call, or wrong."""
    if tokens == known.tokens:
        out.same += 1
        return
    pairs = zip(tokens, known.tokens, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is not None and known.gaps[at] < CLOSE_LOGITS:
        out.close_calls += 1
    else:
        where = f"token {at} of {len(known.tokens)}"
        gap = "" if at is None else f", where the logits are {known.gaps[at]:.2g} apart"
        out.wrong.append(f"{known.prompt[:40]!r}: differs at {where}{gap}")
