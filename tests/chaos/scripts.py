"""What streams ask: a mix of prompts, samplings, lengths and stop strings, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire import SamplingParams, StructuredOutputsParams

LINES = (
    "ROMEO:\nBut, soft! what light through yonder window breaks?\n",
    "HAMLET:\nTo be, or not to be, that is the question:\n",
    "KING HENRY:\nOnce more unto the breach, dear friends, once more;\n",
    "JULIET:\nO Romeo, Romeo! wherefore art thou Romeo?\n",
    "MACBETH:\nIs this a dagger which I see before me,\nThe handle toward my hand?\n",
    "ANTONY:\nFriends, Romans, countrymen, lend me your ears;\n",
)


# A constraint under which an answer has many tokens, and almost all of them a choice.
REGEX = r"([a-z]{1,9} ){20,60}[A-Z]{3}"


@dataclass(frozen=True)
class Script:
    """One request."""

    number: int
    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    n: int = 1
    # -1: not asked for.
    logprobs: int = -1
    stop: str = ""
    # The constraint that the answer must match.
    regex: str = ""

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=[self.stop] if self.stop else None,
            n=self.n,
            logprobs=self.logprobs if self.logprobs >= 0 else None,
            structured_outputs=StructuredOutputsParams(regex=self.regex) if self.regex else None,
        )

    def body(self) -> dict[str, object]:
        """For HTTP."""
        stop = {"stop": [self.stop]} if self.stop else {}
        logprobs = {"logprobs": self.logprobs} if self.logprobs >= 0 else {}
        structured = {"structured_outputs": {"regex": self.regex}} if self.regex else {}
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": 1,  # a model may have another default
            "seed": self.seed,
            "n": self.n,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **stop,
            **logprobs,
            **structured,
        }

    def __str__(self) -> str:
        kind = "greedy" if self.temperature == 0 else f"seed {self.seed}"
        extras = [f"n {self.n}"] * (self.n > 1) + [f"logprobs {self.logprobs}"] * (self.logprobs >= 0)
        extras += [f"stop {self.stop!r}"] * bool(self.stop) + [f"regex {self.regex}"] * bool(self.regex)
        return f"script {self.number} ({', '.join([kind, f'{self.max_tokens} tokens', *extras])})"


def make_scripts(count: int, seed: int, least: int, most: int) -> list[Script]:
    """Without stop strings: see `with_stop`."""
    rng = random.Random(seed)
    scripts = []
    for number in range(count):
        lines = rng.sample(LINES, rng.randint(1, 4))
        temperature = rng.choice((0.0, 0.0, 0.7, 1.0))
        prompt = f"ACT {number}.\n" + "".join(lines)
        n = 2 if number % 5 == 3 and temperature else 1
        logprobs = 2 if number % 4 == 1 else -1
        scripts.append(Script(number, prompt, rng.randint(least, most), temperature, rng.getrandbits(31), n, logprobs))
    return scripts


def make_long_scripts(count: int, seed: int, least: int, most: int) -> list[Script]:
    """Prompts of some hundred tokens to a thousand, each its own from the first word on."""
    rng = random.Random(seed)
    scripts = []
    for script in make_scripts(count, seed, least, most):
        prompt = f"ACT {script.number}.\n" + "".join(rng.choices(LINES, k=rng.randint(12, 40)))
        scripts.append(replace(script, prompt=prompt))
    return scripts


def make_conversations(users: int, turns: int, seed: int, least: int, most: int) -> list[Script]:
    """Turns of users, each with all that its user said before; some users begin with the same long text. n of some."""
    rng = random.Random(seed)
    rules = [f"THE RULES OF HOUSE {house}.\n" + "".join(rng.choices(LINES, k=24)) for house in range(3)]
    scripts = list[Script]()
    for user in range(users):
        said = rules[user % len(rules)]
        for turn in range(turns):
            said += f"USER {user}, {turn}:\n" + "".join(rng.sample(LINES, rng.randint(1, 3)))
            temperature = rng.choice((0.0, 0.0, 0.7))
            n, logprobs = (2 if turn == 1 and temperature else 1), (2 if turn == 0 else -1)
            length, number = rng.randint(least, most), len(scripts)
            scripts.append(Script(number, said, length, temperature, rng.getrandbits(31), n, logprobs))
    return scripts


def with_constraints(scripts: Sequence[Script]) -> list[Script]:
    """The same, where the answers of every fourth must match REGEX."""
    return [replace(script, regex=REGEX if script.number % 4 == 2 else "") for script in scripts]


def with_stop(script: Script, text: str) -> Script:
    """The same, stopped by a few characters from the middle of its answer."""
    middle = len(text) // 2
    return replace(script, stop=text[middle : middle + 4])
