"""Mistakes with texts: `data` and `cutoffs`."""

from __future__ import annotations

from tests.abuse.mistake import failure, usage

MISTAKES = [
    failure("data get no-such-corpus", "no-such-corpus"),
    failure("data get enwik", "did you mean 'enwik8'"),
    failure("data get ''", "."),
    failure("data get ../../etc/passwd", "passwd"),
    failure("data add enwik8 text.txt", "enwik8"),
    failure("data add mine nowhere.txt", "nowhere.txt"),
    failure("data add mine dangling.txt", "dangling.txt"),
    failure("data add mine 'empty folder'", "empty folder"),
    failure("data add mine empty.txt", "empty.txt"),
    failure("data add a/b text.txt", "name|a/b"),
    failure("data add '' text.txt", "name|empty"),
    failure(["data", "add", "a\nb", "text.txt"], "name"),
    failure(["data", "add", "\x1b[31m", "text.txt"], "name"),
    failure(["data", "add", "mine", "x" * 5000], "."),
    usage("data add mine ''", "PATH is empty"),
    failure("data info nowhere.txt", "nowhere.txt"),
    failure("data info empty.txt", "empty.txt"),
    failure("data info '*.nothing'", "no file matches"),
    failure("data info text.txt,nowhere.txt", "there is no file nowhere.txt"),
    failure("data info text.txt,,line.txt", "empty entry"),
    failure("data info 'pictures/*,text.txt'", "a.png"),
    failure("data info run/metrics.jsonl", "line 1 of run/metrics.jsonl has no field 'text'"),
    failure("data info text.txt --field text", "leave out data.field"),
    failure("train tiny.toml --out new --data 'nowhere/*.txt'", "no file matches"),
    usage("data info text.txt --binary --field text", "leave out field"),
    *(usage(f"data info text.txt --processes={number}", "processes must be") for number in (0, -1, 99999)),
    failure("data info line.txt --tokenizer bpe --vocabulary-size 300", "line.txt|text"),
    failure("data info circle.txt", "circle.txt"),
    failure("data info 'empty folder'", "empty folder"),
    failure("data info pictures", "pictures"),
    failure("data info ''", "."),
    usage("data info text.txt --tokenizer syllable", "tokenizer"),
    usage("data info text.txt --tokenizer ''", "tokenizer"),
    usage("data info text.txt --tokenizer bpe", "vocabulary_size"),
    usage("data info text.txt --tokenizer byte --vocabulary-size 7", "vocabulary_size"),
    usage("data info text.txt --tokenizer bpe --vocabulary-size 0", "vocabulary_size"),
    usage("data info text.txt --tokenizer bpe --vocabulary-size=-7", "vocabulary_size"),
    usage("data info text.txt --tokenizer bpe --vocabulary-size 99999999999999999999", "too large"),
    *(
        usage(
            f"data info text.txt --tokenizer {kind} --vocabulary-size {size}",
            "vocabulary_size must be between",
        )
        for kind in ("bpe", "sentencepiece", "word", "number")
        for size in (0, 3_000_000_000, 10**18)
    ),
    failure("data info text.txt --tokenizer number --vocabulary-size 7", "number"),
    *(
        usage(
            f"data info text.txt --tokenizer {kind} --vocabulary-size 3", "vocabulary_size of 3 is too small"
        )
        for kind in ("bpe", "sentencepiece")
    ),
    failure("data info text.txt --tokenizer sentencepiece-default --vocabulary-size 3", "3 pieces from text"),
    failure("data info pipe", "pipe is not a regular file"),
    failure("data add mine /dev/zero", "/dev/zero is not a regular file"),
    failure("cutoffs --counts /dev/zero --clusters 2", "/dev/zero is a device"),
    failure("cutoffs --counts /dev/null --clusters 2", "/dev/null is a device"),
    # cutoffs
    usage("cutoffs --clusters 2", "give either a corpus or --counts"),
    usage("cutoffs text.txt --counts counts.txt --clusters 2", "give either a corpus or --counts"),
    usage("cutoffs --counts counts.txt --clusters 2 --lowercase", "--lowercase has no effect with --counts"),
    usage("cutoffs --counts counts.txt --clusters 2 --tokens 5", "no effect without --cost time"),
    usage("cutoffs --counts counts.txt --clusters 2 --cost time --tokens 0", "at least 1"),
    usage("cutoffs --counts counts.txt --clusters 2 --cost time --width=-1", "at least 1"),
    usage("cutoffs --counts counts.txt --clusters 2 --cost time --constants 1,2", "three numbers"),
    usage("cutoffs --counts counts.txt --clusters 2 --cost time --constants 1,nan,2", "three numbers"),
    usage("cutoffs --counts counts.txt --clusters 2 --cost time --constants 1,inf,2", "three numbers"),
    usage("cutoffs --counts counts.txt --clusters 2 --cost time --constants=-1,1,2", "three numbers"),
    usage("cutoffs --counts counts.txt --clusters 2 --cost time --constants a,b,c", "three numbers"),
    usage("cutoffs --counts counts.txt --clusters 2 --cost time --constants 1,1,1 --width 8", "leave out"),
    failure("cutoffs --counts counts.txt --clusters 0", "clusters"),
    failure("cutoffs --counts counts.txt --clusters=-2", "clusters"),
    failure("cutoffs --counts counts.txt --clusters 4", "clusters"),
    failure("cutoffs --counts counts.txt --clusters 99999999999999999999", "clusters"),
    failure("cutoffs --counts nowhere.txt --clusters 2", "no file nowhere.txt"),
    failure("cutoffs --counts taken --clusters 2", "taken is a folder"),
    failure("cutoffs --counts empty.txt --clusters 2", "empty.txt is empty"),
    failure("cutoffs --counts words.txt --clusters 2", "words.txt, line 1: 'five' is not a count"),
    failure("cutoffs --counts negative.txt --clusters 2", "negative"),
    failure("cutoffs --counts zeros.txt --clusters 2", "zero|count"),
    failure("cutoffs --counts circle.txt --clusters 2", "circle.txt"),
    failure("cutoffs nowhere.txt --clusters 2", "nowhere.txt"),
    failure("cutoffs empty.txt --clusters 2", "empty.txt"),
    usage("cutoffs text.txt --clusters 2 --tokenizer syllable", "tokenizer"),
]
