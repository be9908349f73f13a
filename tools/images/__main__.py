"""`make images`: builds all images, and runs each as an ordinary user on a read-only root without capabilities. Prints
a line for each: size, time until ready, memory. Fails if one does not become ready.

It needs root, podman with runc, and debootstrap unless --base names an image.
"""

from __future__ import annotations

import argparse
import sys
import time

from tools.images.base import debian_base
from tools.images.bill import bill_problem
from tools.images.podman import image_bytes
from tools.images.recipe import TARGETS, build_image, image_name
from tools.images.run import Report, Runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--base", default="", help="base image (default: Debian 12, made by debootstrap)")
    parser.add_argument("--no-build", action="store_true", help="take the images of the last build")
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - {*TARGETS}:
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    targets = [name for name in TARGETS if name in (arguments.targets or TARGETS)]
    if not arguments.no_build:
        base = arguments.base or debian_base()
        for target in targets:
            began = time.monotonic()
            build_image(target, base)
            if problem := bill_problem(image_name(target), target):
                print(f"{target}: {problem}")
                return 1
            print(f"built {image_name(target)} in {time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{'image':<12} {'size':>9} {'ready after':>12} {'memory':>9}  what was run", flush=True)
    failed = 0
    with Runs() as runs:
        for target in targets:
            report = runs.run(target)
            failed += bool(report.error)
            print(_line(report), flush=True)
    return int(failed > 0)


def _line(report: Report) -> str:
    size = f"{image_bytes(image_name(report.target)) / 1e6:.0f} MB"
    if report.error:
        return f"{report.target:<12} {size:>9}  FAILED: {report.error}"
    memory = f"{report.memory_bytes / 1e6:.0f} MB"
    return f"{report.target:<12} {size:>9} {report.ready_s:>10.1f} s {memory:>9}  {report.note}"


if __name__ == "__main__":
    sys.exit(main())
