"""Runs one target in this process: `python -m tests.fuzz.run_target NAME FOLDER INPUTS SEED ENGINE`.

ENGINE `atheris` instruments the product as it is imported, and has libFuzzer choose which inputs to change further:
those that reach code that no input has reached. ENGINE `random` changes the seeds, the files of FOLDER/corpus, and what
came of them, by chance alone. ENGINE `lines` runs a sample of an earlier run's inputs again, and counts the lines of
the product that they reach. Each writes what it found to FOLDER.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.target import Outcome, Target
    from tests.fuzz.watch import Watch

PRODUCT = ["quire_common", "quire_kvstore", "quire_router", "quire_scheduler", "quire_tokenizer", "quire_worker"]
CORPUS = "corpus"
"""Folder of the inputs that libFuzzer kept, in the folder of a run."""
_SAMPLE = 1000
_POOL = 2000
_MOST_INPUT_BYTES = 1 << 16
_MOST_FINDINGS = 20


class Recorder:
    """Gives inputs to a target one by one, and keeps what became of them."""

    def __init__(self, target: Target, folder: Path, watch: Watch, seed: int) -> None:
        self._target = target
        self._folder = folder
        self._choose = random.Random(seed)
        self._watch = watch
        self._began = time.monotonic()
        self.outcomes: Counter[str] = Counter()
        self.findings: dict[str, str] = {}
        self._sample: list[bytes] = []
        self._growth_mib = 0.0
        self.done = 0

    def run(self, data: bytes) -> Outcome | None:
        """Give the target an input, and return the outcome; None: a finding. A finding is kept with its input, once for
        each place in the code."""
        self._keep(data)
        self._watch.begin()
        outcome = None
        try:
            outcome = self._target.run(data)
            self.outcomes[outcome.value] += 1
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # whatever comes out is what is looked for; a panic of Rust is no Exception
            self._found(error, data)
        try:
            self._watch.end()
        except Exception as error:  # a Finding of the watch, or a file of /proc that is gone
            self._found(error, data)
        self.done += 1
        return outcome

    def measure_growth(self) -> None:
        """Note how much memory the process has gained, while the target still has its services."""
        self._growth_mib = self._watch.growth_mib()

    def write_figures(self) -> None:
        """Write the figures and the sample to the folder."""
        figures = {
            "inputs": self.done,
            "seconds": time.monotonic() - self._began,
            "outcomes": dict(self.outcomes),
            "slowest_s": self._watch.slowest_s,
            "growth_mib": self._growth_mib,
            "findings": self.findings,
        }
        (self._folder / "figures.json").write_text(json.dumps(figures))
        (self._folder / "sample.json").write_text(json.dumps([data.hex() for data in self._sample]))

    def _keep(self, data: bytes) -> None:
        """Keep a sample in which each input so far is with the same probability."""
        if len(self._sample) < _SAMPLE:
            self._sample.append(data)
        elif (at := self._choose.randrange(self.done + 1)) < _SAMPLE:
            self._sample[at] = data

    def _found(self, error: BaseException, data: bytes) -> None:
        frames = traceback.extract_tb(error.__cause__.__traceback__ if error.__cause__ else error.__traceback__)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        name = f"{type(error).__name__} at {place}"
        if name in self.findings or len(self.findings) >= _MOST_FINDINGS:
            return
        file = self._folder / f"input-{len(self.findings)}"
        file.write_bytes(data)
        shown = "".join(traceback.format_exception(error))[-3000:]
        self.findings[name] = f"{file}: {name}: {error}\n{shown}"


def run_random(recorder: Recorder, target: Target, corpus: Path, inputs: int, seed: int) -> None:
    """Change seeds and files of the corpus, if there is one, by chance alone. What was changed may be changed again, if
    the first parser passes it: changes of what no parser reads test little."""
    from tests.fuzz.target import Outcome

    choose = random.Random(seed)
    pool = [*target.seeds(), *(file.read_bytes() for file in sorted(corpus.glob("*")))]
    for data in pool:
        recorder.run(data)
    kept = len(pool)
    while recorder.done < inputs:
        data = target.mutate(choose.choice(pool), choose)[:_MOST_INPUT_BYTES]
        outcome = recorder.run(data)
        if choose.random() < 0.2 and outcome is not Outcome.UNREADABLE:
            pool.append(data)
        if len(pool) > _POOL:
            del pool[kept : kept + _POOL // 2]


def run_atheris(recorder: Recorder, target: Target, folder: Path, inputs: int, seed: int) -> None:
    """Have libFuzzer change inputs. Does not return: libFuzzer ends the process."""
    import atheris

    corpus = folder / CORPUS
    corpus.mkdir(exist_ok=True)
    for number, data in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(data)

    def one_input(data: bytes) -> None:
        recorder.run(data)
        if recorder.done >= inputs:
            # The end of a target checks its services, and ends servers, which would hold our output open.
            recorder.measure_growth()
            target.__exit__(None, None, None)
            recorder.write_figures()
            sys.stdout.flush()
            os._exit(0)

    def mutate(data: bytes, max_size: int, chosen: int) -> bytes:
        return target.mutate(data, random.Random(chosen))[:max_size]

    # libFuzzer's own limits are far: ours tell what an input did, and go on.
    options = [f"-seed={seed + 1}", "-timeout=600", "-rss_limit_mb=4096", f"-max_len={_MOST_INPUT_BYTES}", "-runs=-1"]
    options.append(f"-artifact_prefix={folder}/")
    atheris.Setup([sys.argv[0], *options, "-verbosity=0", str(corpus)], one_input, custom_mutator=mutate)
    atheris.Fuzz()


def run_lines(target: Target, folder: Path, reached: dict[str, set[int]]) -> None:
    """Run the sample again."""
    for text in json.loads((folder / "sample.json").read_text()):
        try:
            target.run(bytes.fromhex(text))
        except Exception:  # the run itself has told it
            continue
    from tests.fuzz.lines import lines_of

    (folder / "lines.json").write_text(json.dumps(lines_of(type(target).covers, reached)))


def main() -> None:
    name, folder, inputs, seed, engine = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    reached: dict[str, set[int]] = {}
    if engine == "atheris":
        import atheris

        with atheris.instrument_imports(include=PRODUCT):
            from tests.fuzz.targets import TARGETS

            kind = TARGETS[name].load()
    else:
        if engine == "lines":
            from tests.fuzz.lines import record

            record(reached)
        from tests.fuzz.targets import TARGETS

        kind = TARGETS[name].load()
    with tempfile.TemporaryDirectory(prefix="quire-fuzz-") as own, kind(Path(own)) as target:
        if engine == "lines":
            run_lines(target, folder, reached)
            return
        from tests.fuzz.watch import Watch

        recorder = Recorder(target, folder, Watch(inputs), seed)
        if engine == "atheris":
            run_atheris(recorder, target, folder, inputs, seed)
        run_random(recorder, target, folder / CORPUS, inputs, seed)
        recorder.measure_growth()
    recorder.write_figures()


if __name__ == "__main__":
    main()
