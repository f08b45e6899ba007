"""``moeless demo``: serve the demo model, talk to it, and show what its experts did."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import resources
from typing import Any

import click
from click.exceptions import Exit
from rich.console import Console

from moeless.cli.experts_table import print_experts
from moeless.cli.progress import ProgressLines
from moeless.errors import ConfigError, EngineError

_READY = "serving "
_STOP_TIMEOUT_S = 10.0
_WIDTH = 120


@dataclass(kw_only=True)
class _Answer:
    prompt: str
    text: str
    tokens: int
    first_s: float
    seconds: float


@click.command()
@click.option(
    "--prompts",
    type=click.IntRange(1, 24),
    default=16,
    show_default=True,
    help="How many chat prompts to send at once.",
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=48, show_default=True)
@click.option("--policy", default="moeless", show_default=True, help="How replicas are chosen.")
@click.option(
    "--predictor",
    default="gate",
    show_default=True,
    metavar="NAME|DIR",
    help="How loads are expected, as moeless serve takes it.",
)
@click.option(
    "--invoker",
    type=click.Choice(["auto", "process", "inline"]),
    default="auto",
    show_default=True,
    help="How the two devices run, as moeless serve takes it; the server says what auto chose.",
)
@click.option(
    "--model", default="demo", show_default=True, help='A directory, a hub id, or "demo".'
)
def demo(
    prompts: int, max_tokens: int, policy: str, predictor: str, invoker: str, model: str
) -> None:
    """Serve the demo model on two devices, ask it real questions, show what the experts did.

    Everything that is started is stopped again.

    \b
    Examples:
      moeless demo
      moeless demo --prompts 24 --max-tokens 100 --policy static
    """
    console = Console()
    if console.width < _WIDTH:
        console = Console(width=_WIDTH)  # a table that is cut off tells nothing
    command = [sys.executable, "-m", "moeless", "serve", model, "--port", "0"]
    command += ["--devices", "cpu:2", "--policy", policy, "--max-batch-size", "32"]
    if predictor != "gate":
        command += ["--predictor", predictor]
    if invoker != "auto":
        command += ["--invoker", invoker]
    console.print(f"[dim]$ moeless {' '.join(command[3:])}[/dim]", highlight=False)
    if model == "demo":
        _build_model(console)
    server = subprocess.Popen(  # noqa: S603 - our own interpreter and module
        command, stdout=subprocess.PIPE, text=True
    )
    try:
        url = _await_ready(server)
        asked = resources.files("moeless.cli").joinpath("demo_prompts.txt").read_text("utf8")
        began_s = time.perf_counter()
        with ProgressLines(lambda line: console.print(f"[dim]{line}[/dim]")) as lines:
            answers = asyncio.run(
                _ask_all(url, asked.splitlines()[:prompts], max_tokens, console, lines)
            )
        seconds = time.perf_counter() - began_s
        experts = asyncio.run(_experts(url))
    finally:
        _stop(server)
    tokens = sum(answer.tokens for answer in answers)
    firsts = sorted(answer.first_s for answer in answers)
    print_experts(console, experts)
    console.print(
        f"\n[bold]{len(answers)} answers, {tokens} tokens in {seconds:.1f} s: "
        f"{tokens / seconds:.1f} tokens/s[/bold], first token after "
        f"{firsts[len(firsts) // 2]:.2f} s (median) to {firsts[-1]:.2f} s (last). "
        f"Measured on this machine, {os.cpu_count()} cores.",
        highlight=False,
    )


def _build_model(console: Console) -> None:
    from moeless.cli.demo_model import build_and_show, tabulate_summary
    from moeless.engines.demo import choose_variant

    _, report = build_and_show(choose_variant(16))
    console.print(tabulate_summary(report))


def _await_ready(server: subprocess.Popen[str]) -> str:
    """The address in the server's ready line."""
    assert server.stdout is not None
    for line in server.stdout:
        if _READY in line:
            return line.split(" on ", 1)[1].split(" ", 1)[0]
    code = server.wait()
    if code == ConfigError.exit_code:
        raise Exit(code)  # the server has said what is wrong
    raise EngineError(f"the server ended with exit code {code} before it was ready")


async def _ask_all(
    url: str, prompts: list[str], max_tokens: int, console: Console, lines: ProgressLines
) -> list[_Answer]:
    lines.stage("loading a client")
    from openai import AsyncOpenAI

    answered = 0
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600) as client:
        model = (await client.models.list()).data[0].id

        async def ask(prompt: str) -> _Answer:
            nonlocal answered
            began_s = time.perf_counter()
            first_s, parts, tokens = 0.0, [], 0
            stream = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=max_tokens,
                temperature=0.6,
                top_p=0.9,
                seed=1,
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
                if chunk.choices and chunk.choices[0].delta.content:
                    first_s = first_s or time.perf_counter() - began_s
                    parts.append(chunk.choices[0].delta.content)
            answer = _Answer(
                prompt=prompt,
                text="".join(parts).strip(),
                tokens=tokens,
                first_s=first_s,
                seconds=time.perf_counter() - began_s,
            )
            answered += 1
            lines.tell("questions answered", answered, len(prompts))
            console.print(f"\n[bold cyan]> {prompt}[/bold cyan]", highlight=False)
            console.print(answer.text, highlight=False, markup=False)
            return answer

        lines.tell("questions answered", 0, len(prompts))
        return list(await asyncio.gather(*map(ask, prompts)))


async def _experts(url: str) -> dict[str, Any]:
    import httpx

    async with httpx.AsyncClient(timeout=30) as client:
        response = await client.get(f"{url}/moeless/experts")
        response.raise_for_status()
        experts: dict[str, Any] = response.json()
        return experts


def _stop(server: subprocess.Popen[str]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
