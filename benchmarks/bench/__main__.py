"""``python -m benchmarks.bench``: the benchmark with plain arguments and a plain table, on torch alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bench.base import compare_with, comparison_table
from benchmarks.bench.records import records_table
from benchmarks.bench.run import Request, execute, listing, listing_json
from logitless.errors import LogitlessError


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The same options as ``python -m benchmarks bench``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description="Time, peak memory and exactness.")
    parser.add_argument("--case", action="extend", nargs="+", default=[], help="names or patterns: 'reference-*'")
    parser.add_argument("--provider", action="extend", nargs="+", default=[], help="names or patterns")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--out", type=Path, help="file to append to; default DEVICE.jsonl, in benchmarks/results")
    parser.add_argument("--repeats", type=int, default=10, help="timed repeats per provider (default 10)")
    parser.add_argument("--peers", type=Path, help="folder of unpacked packages to import peers from")
    parser.add_argument("--commit", help="commit to record where the code has no git history")
    parser.add_argument("--base", help="commit to compare this checkout with")
    parser.add_argument("--list", action="store_true", help="list cases and providers, measure nothing")
    parser.add_argument("--json", action="store_true", help="print records, or the list, as JSON")
    return parser.parse_args(arguments)


def _report(text: str) -> None:
    sys.stderr.write(text + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = parse(arguments)
    if options.list:
        sys.stdout.write((json.dumps(listing_json(), indent=1) if options.json else listing()) + "\n")
        return 0
    request = Request(
        cases=options.case,
        providers=options.provider,
        device=options.device,
        out=options.out,
        repeats=options.repeats,
        peers=options.peers,
        commit=options.commit,
    )
    try:
        if options.base is not None:
            return _compare(options.base, request, options.json)
        records, out = execute(request, _report)
    except LogitlessError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stderr.write(f"{len(records)} records appended to {out}\n\n")
    sys.stdout.write("\n".join(r.to_json() for r in records) + "\n" if options.json else records_table(records) + "\n")
    return 0


def _compare(base: str, request: Request, as_json: bool) -> int:
    comparison = compare_with(base, request, _report)
    lines = [c.to_json() for c in comparison.compared] if as_json else [comparison_table(comparison)]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(comparison.broken)


if __name__ == "__main__":
    sys.exit(main())
