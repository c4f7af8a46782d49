"""`longspan cutoffs`: the cheapest clusters for the adaptive softmax of a corpus."""

from __future__ import annotations

import argparse
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longspan.cli.console import add_quiet_option, say, show_table
from longspan.cli.paths import as_path
from longspan.cli.plugin_option import add_plugin_option
from longspan.cli.tokenizer_options import add_tokenizer_options, given_tokenizer_options, tokenizer_config
from longspan.config import DataConfig
from longspan.errors import UsageError, UserError
from longspan.json_text import to_json
from longspan.progress import task, tell

if TYPE_CHECKING:
    from longspan.output.cutoffs import Cost
    from longspan.output.product_time import ProductTime

WIDTH, TOKENS, DEVICE = 512, 8192, "auto"
MOST_OCCURRENCES = 10**15  # that stand for a probability of 1


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "cutoffs",
        help="find the cheapest clusters for an adaptive softmax",
        description="Split a vocabulary, in the order of its tokens, into the cheapest clusters.",
    )
    parser.add_argument("corpus", nargs="?", metavar="CORPUS", help="a named corpus, a text file or a folder")
    parser.add_argument(
        "--counts", type=as_path, metavar="FILE", help="in place of a corpus: one count per line"
    )
    parser.add_argument(
        "--unigrams",
        type=as_path,
        metavar="FILE",
        help="in place of a corpus: the probability of each word, separated by blanks or newlines",
    )
    parser.add_argument("--clusters", type=int, required=True, metavar="K", help="clusters; K - 1 cutoffs")
    parser.add_argument(
        "--cost",
        choices=("scores", "time"),
        default="scores",
        help="what to minimise: scores within clusters, or time by the model of Grave et al. (default: "
        "scores)",
    )
    add_plugin_option(parser)
    add_tokenizer_options(parser, default="word")
    timing = parser.add_argument_group("with --cost time")
    timing.add_argument("--tokens", type=int, metavar="B", help=f"tokens of a block (default: {TOKENS})")
    timing.add_argument("--width", type=int, metavar="D", help=f"size of hidden states (default: {WIDTH})")
    timing.add_argument("--device", help=f"where to measure: auto, cpu, cuda (default: {DEVICE})")
    timing.add_argument(
        "--constants",
        type=_constants,
        metavar="C,LAMBDA,FLOOR",
        help="do not measure: seconds per product, seconds per score, and the number of scores up to which "
        "a product takes no longer than an empty one",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_quiet_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from longspan.output.cutoffs import ScoreCost, TimeCost, best_cutoffs

    _check(args)
    counts = _counts(args)
    if any(first < second for first, second in pairwise(counts)):
        say("note: the vocabulary is not sorted by frequency; it is split in its own order")
    tokens, product = args.tokens or TOKENS, None
    if args.cost == "time":
        product = args.constants or _measured(args)
    begun = time.perf_counter()
    cost: Cost = (
        ScoreCost(counts, args.clusters)
        if product is None
        else TimeCost(counts, args.clusters, floor=product.floor / tokens)
    )
    with task("comparing clusters"):
        cutoffs = best_cutoffs(cost)
    tell(f"found in {time.perf_counter() - begun:.2f} s")
    clusters = _clusters(counts, cutoffs)
    (whole,) = _clusters(counts, ())
    if product is None:
        adaptive, plain = cost.total(cutoffs) / cost.num_tokens, float(cost.num_words)
        unit = "scores per token"
    else:
        adaptive, plain = _milliseconds(product, tokens, clusters), _milliseconds(product, tokens, [whole])
        unit = f"ms per {tokens:,} tokens"
    if args.json:
        found = [one._asdict() for one in clusters]
        costs = {"cost": adaptive, "cost_of_plain_softmax": plain, "unit": unit}
        print(to_json({"cutoffs": cutoffs, "clusters": found} | costs))
        return
    _show(whole, clusters, counted=args.unigrams is None)
    _compare(adaptive, plain, unit)
    print(f"\n[model.vocabulary]\ncutoffs = {list(cutoffs)}\n")
    print(f"or: longspan train RECIPE --model.vocabulary.cutoffs '{list(cutoffs)}'")


def _constants(text: str) -> ProductTime:
    from longspan.output.product_time import ProductTime

    try:
        constant, per_score, floor = map(float, text.split(","))
        if not (0 <= constant < float("inf") and 0 < per_score < float("inf") and 0 <= floor < float("inf")):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{text}' must be three numbers such as 5e-6,2e-11,5e5, none negative and the second above 0"
        ) from None
    return ProductTime(constant, per_score, floor)


def _check(args: argparse.Namespace) -> None:
    sources = [args.corpus, args.counts, args.unigrams]
    if sum(source is not None for source in sources) != 1:
        raise UsageError(
            "give either a corpus or --counts FILE or --unigrams FILE (see 'longspan cutoffs --help')"
        )
    if args.corpus is None and (given := given_tokenizer_options(args)):
        option = "--unigrams" if args.counts is None else "--counts"
        raise UsageError(f"{given[0]} has no effect with {option}: the words are counted already")
    for name in ("tokens", "width", "device", "constants"):
        value = getattr(args, name)
        if value is not None and args.cost != "time":
            raise UsageError(f"--{name} has no effect without --cost time")
        if isinstance(value, int) and value < 1:
            raise UsageError(f"--{name} must be at least 1, not {value}")
    if args.constants is not None and (args.width or args.device):
        raise UsageError("with --constants nothing is measured: leave out --width and --device")


def _counts(args: argparse.Namespace) -> list[int]:
    if args.counts is not None:
        return _read_counts(args.counts)
    if args.unigrams is not None:
        return _read_unigrams(args.unigrams, args.clusters)
    from longspan.data import count_tokens, prepare

    corpus = prepare(DataConfig(corpus=args.corpus, tokenizer=tokenizer_config(args)), tell)
    counts: list[int] = count_tokens(corpus.splits["train"].tokens, corpus.tokenizer.vocabulary_size).tolist()
    return counts


def _read_counts(path: Path) -> list[int]:
    lines = _read(path, "--counts a file with one count per line").splitlines()
    counts = []
    for number, line in enumerate(lines, start=1):
        try:
            counts.append(int(line))
        except ValueError:
            shown = line[:40].decode("utf-8", "replace")
            raise UserError(
                f"{path}, line {number}: '{shown}' is not a count: write one whole number per line"
            ) from None
    if not counts:
        raise UserError(f"{path} is empty: it must hold one count per line")
    return counts


def _read_unigrams(path: Path, num_clusters: int) -> list[int]:
    """Whole numbers that are proportional to the probabilities, as large as exact sums allow.

    The probabilities need not add up to 1.
    """
    words = _read(path, "--unigrams a file of probabilities").split()
    if not words:
        raise UserError(f"{path} is empty: it must hold the probability of each word")
    values = []
    for number, word in enumerate(words, start=1):
        try:
            value = float(word)
            if not 0 <= value < float("inf"):
                raise ValueError
        except ValueError:
            shown = word[:40].decode("utf-8", "replace")
            raise UserError(
                f"{path}, entry {number}: '{shown}' is not a probability: write numbers of at least 0, "
                "separated by blanks or newlines"
            ) from None
        values.append(value)
    total = math.fsum(values)
    if not 0 < total < float("inf"):
        raise UserError(f"the probabilities in {path} add up to {total:g}: at least one must be above 0")
    num_clusters = max(1, num_clusters)  # fewer are refused later
    exact = 2**62 // (num_clusters * (len(values) + num_clusters))
    return [round(value / total * min(MOST_OCCURRENCES, exact)) for value in values]


def _read(path: Path, what: str) -> bytes:
    if path.is_char_device():  # such as /dev/zero, which never ends
        raise UserError(f"{path} is a device: give {what}")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no file {path}: give {what}") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: give {what}") from None


def _measured(args: argparse.Namespace) -> ProductTime:
    from longspan.output.product_time import fit, measure, typical_error
    from longspan.runs.environment import pick_device

    device, width = pick_device(args.device or DEVICE), args.width or WIDTH
    with task(f"measuring matrix products of width {width} on {device}"):
        measured = measure(width, device)
    product = fit(measured)
    error = typical_error(product, measured)
    say(
        f"--constants {product.constant:.3g},{product.per_score:.3g},{product.floor:.3g} "
        f"({error:.0%} off in the median{'; is the machine busy?' if error > 0.3 else ''})"
    )
    return product


class _Cluster(NamedTuple):
    start: int
    words: int
    tokens: int


def _clusters(counts: list[int], cutoffs: tuple[int, ...]) -> list[_Cluster]:
    bounds = pairwise((0, *cutoffs, len(counts)))
    return [_Cluster(start, end - start, sum(counts[start:end])) for start, end in bounds]


def _milliseconds(product: ProductTime, tokens: int, clusters: list[_Cluster]) -> float:
    """Expected time of all products of a block: all tokens in the first, a share in the others."""
    first, *further = clusters
    total = sum(cluster.tokens for cluster in clusters)
    scores: list[float] = [(first.words + len(further)) * tokens]
    scores += [cluster.words * tokens * cluster.tokens / total for cluster in further]
    return 1e3 * sum(map(product.seconds, scores))


def _show(whole: _Cluster, clusters: list[_Cluster], *, counted: bool) -> None:
    print(f"{whole.words:,} words" + (f", {whole.tokens:,} tokens" if counted else ""))
    rows = []
    for number, (start, words, tokens) in enumerate(clusters, start=1):
        shares = f"{words / whole.words:.2%}", f"{tokens / whole.tokens:.2%}"
        rows.append((str(number), f"{start:,}", f"{words:,}", *shares))
    show_table(("cluster", "from", "words", "share of words", "share of tokens"), rows, numbers=True)


def _compare(adaptive: float, plain: float, unit: str) -> None:
    print(f"expected cost: {adaptive:,.3f} {unit}, {adaptive / plain:.2%} of a plain softmax's {plain:,.3f}")
