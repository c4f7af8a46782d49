"""Mistakes with runs: options of `eval`, `generate`, `spans` and `attention`, and damaged run folders."""

from __future__ import annotations

from tests.abuse.mistake import failure, usage

CONFIG = {
    "config-missing": "is not a run folder: it has no config.toml",
    "config-folder": "is not a run folder: it has no config.toml",
    "config-cut": "config.toml is not valid TOML",
    "config-not-text": "config.toml is not UTF-8 text",
    "config-key": "unknown key 'model.num_leyers'; did you mean 'num_layers'",
    "config-type": "'model.width' must be a whole number",
    "config-plugin": "there is no plugin 'no_such_plugin'",
}
TOKENIZER = {
    "tokenizer-missing": "tokenizer",
    "tokenizer-empty": "tokenizer",
    "tokenizer-cut": "tokenizer",
    "tokenizer-list": "tokenizer",
    "tokenizer-deep": "tokenizer",
    "tokenizer-pipe": "tokenizer",
}
MISFIT = {
    "config-empty": "best.safetensors",
    "config-wider": "best.safetensors",
    "config-deeper": "best.safetensors",
}
WEIGHTS = {
    "weights-missing": "there is no checkpoint|has no weights yet",
    "weights-folder": "checkpoint",
    "weights-empty": "best.safetensors",
    "weights-cut": "best.safetensors",
    "weights-header": "best.safetensors",
    "weights-json": "best.safetensors",
    "weights-pickle": "best.safetensors",
    "weights-lost": "best.safetensors",
    "weights-shape": "best.safetensors",
    "weights-surplus": "best.safetensors",
    "weights-nan": "best.safetensors",
    "weights-type": "best.safetensors",
}
SPANS = {
    "spans-missing": "has no spans to show",
    "spans-empty": "has no spans to show",
    "spans-text": "line 1 of .*spans.jsonl is damaged",
    "spans-deep": "line 1 of .*spans.jsonl is damaged",
    "spans-nothing": "spans.jsonl",
    "spans-infinite": "line 1 of .*spans.jsonl is damaged",
    "spans-words": "spans.jsonl",
    "spans-uneven": "spans.jsonl",
    "spans-none": "line 1 of .*spans.jsonl is damaged",
    "spans-nan": "line 1 of .*spans.jsonl has spans that are not finite",
    "spans-layers": "spans.jsonl has lines with different numbers of layers",
    "spans-binary": "spans.jsonl",
}
READERS = ("eval", "generate", "attention")

MISTAKES = [
    *(
        failure(f"{command} {run}", line)
        for command in (*READERS, "spans")
        for run, line in {
            "nowhere": "no run folder nowhere",
            "text.txt": "no run folder text.txt: it is a file",
            "taken": "taken is not a run folder: it has no config.toml",
            "dangling.txt": "no run folder dangling.txt",
            "''": "run folder",
        }.items()
    ),
    *(failure([command, "x" * 5000], "x") for command in (*READERS, "spans")),
    *(
        failure(f"{command} damaged/{run}", line)
        for command in READERS
        for run, line in (CONFIG | TOKENIZER | WEIGHTS | MISFIT).items()
    ),
    *(failure(f"{command} damaged/config-huge", "memory") for command in READERS),
    *(failure(f"spans damaged/{run} --out new.png", line) for run, line in (CONFIG | SPANS).items()),
    *(
        failure(f"spans damaged/{run} --out new.png --freeze new", line)
        for run, line in (TOKENIZER | WEIGHTS | MISFIT).items()
    ),
    *(failure(f"train --resume damaged/{run}", line) for run, line in CONFIG.items()),
    *(
        failure(f"train tiny.toml --out new --init damaged/{run}", line)
        for run, line in (CONFIG | TOKENIZER | WEIGHTS).items()
    ),
    # eval
    usage("eval run --data ''", "--data is empty"),
    failure("eval run --data nowhere.txt", "nowhere.txt"),
    failure("eval run --data empty.txt", "empty.txt"),
    failure("eval run --data 'empty folder'", "empty folder"),
    usage("eval run --split all", "split"),
    usage("eval run --split ''", "split"),
    usage("eval run --protocol mine", "protocol"),
    usage("eval run --batch-size 0", "batch_size"),
    usage("eval run --batch-size=-1", "batch_size"),
    usage("eval run --batch-size x", "'evaluation.batch_size' must be a whole number"),
    usage("eval run --block-length 0", "block_length"),
    usage("eval run --max-tokens 0", "max_tokens"),
    usage("eval run --max-tokens=-1", "max_tokens"),
    usage("eval run --max-tokens 1e3", "'evaluation.max_tokens' must be a whole number"),
    usage("eval run --batch-size 2 --evaluation.batch-size 2", "the same option"),
    usage("eval run --training.seed 3", "has no effect on eval"),
    usage("eval run --model.architecture gpt", "cannot be changed"),
    usage("eval run --model.widht 8", "unknown key 'model.widht'"),
    failure("eval run --model.width 16", "best.safetensors"),
    failure("eval run --model.num-layers 2", "best.safetensors"),
    failure("eval run --data pipe", "pipe"),
    failure("eval run --data /dev/zero", "/dev/zero"),
    failure("eval run --data line.txt --split test", "line.txt"),
    usage("eval run --contexts 16", "--contexts is for the context curve"),
    usage("eval run --curve-tokens 16", "--curve-tokens is for the context curve"),
    usage("eval run --figure new.png", "--figure is for the context curve"),
    usage("eval run --context-curve --contexts ''", "--contexts must be numbers above 0"),
    usage("eval run --context-curve --contexts 16,,64", "--contexts must be numbers above 0"),
    usage("eval run --context-curve --contexts 0", "--contexts must be numbers above 0"),
    usage("eval run --context-curve --contexts=-4", "--contexts must be numbers above 0"),
    usage("eval run --context-curve --curve-tokens 0", "--curve-tokens must be a number above 0"),
    usage("eval run --context-curve --curve-tokens many", "--curve-tokens must be a number above 0"),
    usage("eval run --context-curve --figure new.txt", "--figure must end in .png or .svg"),
    failure("eval run --context-curve --figure text.txt/new.png", "is not a folder"),
    usage("eval run --context-curve --no-memory", "cannot be combined with --no-memory"),
    usage("eval run --context-curve --protocol fairseq", "cannot be combined with --protocol"),
    usage("eval run --context-curve --evaluation.protocol fairseq", "cannot be combined with --protocol"),
    usage("eval run --data.field body", "--data.field says how another text is read"),
    usage("eval run --binary", "--data.binary says how another text is read"),
    usage("eval run --context-curve --dynamic sgd", "cannot be combined with --dynamic"),
    failure("eval run --context-curve --data line.txt", "a context of 16 needs 32 tokens"),
    usage("eval run --dynamic adam", "--dynamic"),
    usage("eval run --dynamic-rate 1", "--dynamic-rate is for dynamic evaluation"),
    usage("eval run --dynamic-decay 1", "--dynamic-decay is for dynamic evaluation"),
    usage("eval run --dynamic sgd --dynamic-rate x", "--dynamic-rate must be a number of at least 0"),
    usage("eval run --dynamic sgd --dynamic-rate=-1", "--dynamic-rate must be a number of at least 0"),
    usage("eval run --dynamic sgd --dynamic-rate nan", "--dynamic-rate must be a number of at least 0"),
    usage("eval run --dynamic sgd --dynamic-rate inf", "--dynamic-rate must be a number of at least 0"),
    usage("eval run --dynamic rms --dynamic-decay 1.5", "--dynamic-decay must be a number from 0 to 1"),
    usage("eval run --dynamic rms --by-position", "cannot be combined with --by-position"),
    # generate
    usage("generate run --tokens=-1", "must be 0 or more, not -1"),
    usage("generate run --temperature=-1", "temperature must be 0"),
    usage("generate run --temperature inf", "temperature must be 0"),
    usage("generate run --top-k 0", "top-k must be at least 1"),
    usage("generate run --top-k=-1", "top-k must be at least 1"),
    usage("generate run --top-p 0", "top-p must be above 0"),
    usage("generate run --top-p 1.1", "top-p must be above 0"),
    usage("generate run --top-p=-inf", "top-p must be above 0"),
    failure("generate run --seed 99999999999999999999999", "a seed has at most 64 bits"),
    failure("generate character --prompt 'a §'", "§"),
    failure(["generate", "character", "--prompt", "\u202e"], "prompt|character|text"),
    # spans
    usage("spans run --out new.jpg", "must end in .png"),
    usage("spans run --out new", "must end in .png"),
    failure("spans run --out taken.png", "taken.png exists already"),
    failure("spans run --out shut/new.png", "shut"),
    failure(["spans", "run", "--out", "n" * 300 + ".png"], "name too long"),
    failure("spans run --out new.png --freeze taken", "taken exists already"),
    failure("spans run --out new.png --freeze run", "run exists already"),
    failure("spans run --out new.png --freeze shut/new", "shut"),
    usage("spans run --text text.txt --freeze new", "give one of them"),
    usage("spans run --text text.txt --out new.jpg", "must end in .png"),
    failure("spans run --text text.txt --out taken.png", "taken.png exists already"),
    failure("spans run --text nowhere.txt", "cannot read nowhere.txt"),
    failure("spans run --text taken", "cannot read taken"),
    failure("spans run --text circle.txt", "cannot read circle.txt"),
    failure("spans run --text pipe", "pipe is not a regular file"),
    failure("spans run --text /dev/zero", "/dev/zero is not a regular file"),
    failure("spans run --text text.txt --device gpu", "there is no device 'gpu'"),
    *(
        failure(f"spans damaged/{run} --text text.txt --out new.png", line)
        for run, line in (CONFIG | TOKENIZER | WEIGHTS | MISFIT).items()
    ),
    # runs
    failure("runs nowhere", "there is no folder nowhere"),
    failure("runs text.txt", "there is no folder text.txt"),
    failure("runs pipe", "there is no folder pipe"),
    failure("runs dangling.txt", "there is no folder dangling.txt"),
    failure("runs circle.txt", "circle.txt"),
    failure("runs taken", "taken has no runs"),
    failure("runs 'empty folder'", "empty folder has no runs"),
    usage("runs ''", "FOLDER is empty"),
    failure(["runs", "x" * 5000], "x"),
    failure(["runs", "\x1b[31m"], r"there is no folder \\x1b"),
    failure("runs", "there is no folder runs"),
    failure("runs ~nobody/runs", "there is no folder"),
    # attention
    failure("attention run nowhere.txt", "nowhere.txt"),
    failure("attention run taken", "taken"),
    failure("attention run circle.txt", "circle.txt"),
    failure("attention run empty.txt", "there are no tokens in empty.txt"),
    failure("attention run -", "there are no tokens in standard input"),
    usage("attention run text.txt --tokens 0", "--tokens must be at least 1"),
    usage("attention run text.txt --tokens=-1", "--tokens must be at least 1"),
    usage("attention run text.txt --scale log", "give its file with --out"),
    usage("attention run text.txt --out new.jpg", "must end in .png or .svg"),
    usage("attention run text.txt --out new.png --token 1", "leave out --token"),
    failure("attention run text.txt --out taken.png", "taken.png exists already"),
    failure("attention run text.txt --json taken.json", "taken.json exists already"),
    failure("attention run text.txt --token=-1", "there is no token -1"),
    failure("attention run text.txt --token 99 --tokens 9", "there is no token 99"),
    failure("attention run text.txt --json shut/new.json", "shut"),
]
