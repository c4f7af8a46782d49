"""Mistakes in the words of any command: options, values, devices, plugins, names."""

from __future__ import annotations

from tests.abuse.mistake import Mistake, failure, usage

# A correct beginning of every command; what follows is the mistake.
COMMANDS = {
    "train": ["train", "tiny.toml", "--out", "new"],
    "search": ["search", "tiny.toml", "--out", "new"],
    "eval": ["eval", "run"],
    "generate": ["generate", "run"],
    "spans": ["spans", "run"],
    "attention": ["attention", "run", "text.txt"],
    "import": ["import", "checkpoints/foreign.pt", "--kind", "sha-rnn", "--out", "new"],
    "data list": ["data", "list"],
    "data get": ["data", "get", "python"],
    "data add": ["data", "add", "mine", "text.txt"],
    "data info": ["data", "info", "text.txt"],
    "recipes": ["recipes", "quickstart"],
    "cutoffs": ["cutoffs", "text.txt", "--clusters", "2"],
    "bench": ["bench", "tiny.toml"],
    "runs": ["runs", "."],
    "inspect": ["inspect", "run", "text.txt"],
    "score": ["score", "run", "text.txt"],
    "report": ["report", "run"],
    "completion": ["completion", "bash"],
    "serve": ["serve", "run", "--port", "0"],
}
# Commands that take any number of positionals, or none more, say so in their own words.
WITH_PLUGINS = [
    name for name in COMMANDS if name not in ("import", "data add", "runs", "report", "completion")
]
WITH_RUN = ("eval", "generate", "spans", "attention", "report", "serve")
WITH_DEVICE = ("eval", "generate", "attention", "bench", "inspect", "score", "serve")
WITH_QUIET = [name for name in COMMANDS if name not in ("data list", "completion", "serve")]
WHOLE_NUMBERS = {
    "search": ["--top"],
    "generate": ["--tokens", "--top-k", "--seed"],
    "attention": ["--token", "--tokens"],
    "data info": ["--vocabulary-size"],
    "cutoffs": ["--clusters", "--tokens", "--width", "--vocabulary-size"],
    "bench": ["--steps"],
    "inspect": ["--tokens", "--attention-tokens", "--token"],
    "serve": ["--port", "--slots", "--max-tokens", "--max-prompt-tokens", "--max-sessions", "--queue"],
}
NUMBERS = {"generate": ["--temperature", "--top-p"], "serve": ["--grace"]}
CHOICES = {
    "eval": ["--checkpoint"],
    "generate": ["--checkpoint"],
    "spans": ["--checkpoint"],
    "attention": ["--checkpoint", "--scale"],
    "data info": ["--order"],
    "cutoffs": ["--cost", "--order"],
    "bench": ["--spans"],
    "inspect": ["--checkpoint"],
    "score": ["--checkpoint"],
    "report": ["--format"],
    "serve": ["--checkpoint"],
}
VALUED = {
    "train": ["--data", "--name", "--out", "--resume", "--init", "--plugin", "--model.width"],
    "search": ["--data", "--name", "--out", "--resume", "--init", "--plugin", "--model.width"],
    "eval": ["--data", "--split", "--protocol", "--batch-size", "--block-length", "--max-tokens", "--device"],
    "generate": ["--prompt", "--device"],
    "spans": ["--out", "--freeze", "--text", "--device"],
    "attention": ["--out", "--device"],
    "import": ["--kind", "--data", "--config", "--pretrained"],
    "data info": ["--tokenizer"],
    "cutoffs": ["--counts", "--unigrams", "--tokenizer", "--device", "--constants"],
    "bench": ["--batch-size", "--block-length", "--device"],
    "inspect": ["--html", "--device"],
    "report": ["--out"],
    "serve": ["--host", "--sessions", "--watch", "--api-key-file", "--allow-origin", "--session-memory"],
}


def _each(options: dict[str, list[str]], *more: str, line: str) -> list[Mistake]:
    """These words after every one of these options; `{}` in the pattern is the option."""
    return [
        usage([*_without(option, COMMANDS[command]), option, *more], line.replace("{}", option))
        for command, names in options.items()
        for option in names
    ]


def _without(option: str, words: list[str]) -> list[str]:
    """A command without an option and its value: an option that is given twice is another mistake."""
    if option not in words:
        return words
    place = words.index(option)
    return words[:place] + words[place + 2 :]


MISTAKES = [
    # the command itself
    usage("trian", "unknown command 'trian'; did you mean 'train'"),
    usage(["frobnicate"], "unknown command 'frobnicate'"),
    usage([""], "unknown command ''"),
    usage(["трейн"], "unknown command 'трейн'"),
    usage(["x" * 100_000], "unknown command"),
    usage(["--nothing"], "unknown option '--nothing'"),
    usage(["--nothing=3", "train"], "unknown option '--nothing'"),
    usage(["-q"], "unknown option '-q'"),
    usage("data", "required: ACTION"),
    usage("data lst", "invalid choice: 'lst'"),
    usage("data get", "required: NAME"),
    usage("data add", "required: NAME, PATH"),
    usage("data add mine", "required: PATH"),
    usage("data info", "required: NAME_OR_PATH"),
    *(usage(command, "required: RUN") for command in WITH_RUN),
    usage("import", "required: --out"),
    usage("cutoffs", "required: --clusters"),
    # options and arguments that no command knows
    *(usage([*words, "--nothing"], "unknown option '--nothing'") for words in COMMANDS.values()),
    *(usage([*words, "--nothing=1"], "unknown option '--nothing'") for words in COMMANDS.values()),
    *(usage([*words, "-z"], "unknown option '-z'") for words in COMMANDS.values()),
    *(
        usage([*words, "surplus"], "unexpected argument 'surplus'")
        for name, words in COMMANDS.items()
        if name not in ("bench", "score", "report", "serve")
    ),
    *(
        usage([*COMMANDS[name], "--model.width", "8"], r"unknown option '--model\.width'")
        for name in (
            "generate",
            "spans",
            "attention",
            "import",
            "data list",
            "recipes",
            "cutoffs",
            "runs",
            "serve",
        )
    ),
    # values
    *_each(
        VALUED | WHOLE_NUMBERS | NUMBERS | CHOICES,
        line="{}'?:? (expected one argument|needs a value)",
    ),
    *_each(WHOLE_NUMBERS, "x", line="{}: invalid int value: 'x'"),
    *_each(WHOLE_NUMBERS, "1.5", line="{}: invalid int value: '1.5'"),
    *_each(WHOLE_NUMBERS, "", line="{}: invalid int value: ''"),
    *_each(NUMBERS, "warm", line="{}: invalid float value: 'warm'"),
    *_each(NUMBERS, "nan", line="(temperature|top-p|--grace) must be"),
    *_each(CHOICES, "neither", line="{}: invalid choice: 'neither'"),
    *_each(CHOICES, "", line="{}: invalid choice: ''"),
    usage("search tiny.toml --top 0", "--top must be at least 1, not 0"),
    usage("search tiny.toml --top=-3", "--top must be at least 1, not -3"),
    # progress and completion
    *(usage([*COMMANDS[name], "--quiet", "--quiet"], "--quiet is given twice") for name in WITH_QUIET),
    *(usage([*COMMANDS[name], "--quiet=1"], "ignored explicit argument '1'") for name in WITH_QUIET),
    usage("train tiny.toml --out new --quiet --verbose", "not allowed with argument --quiet"),
    usage("completion", "required: SHELL"),
    *(
        usage(["completion", shell], "invalid choice")
        for shell in ("tcsh", "", "BASH", "powershell", "/bin/bash", "$(id)", "bash\n")
    ),
    usage("inspect run text.txt --tokens=-1", "--tokens must be 0 or more"),
    usage("inspect run text.txt --tokens 100001", "--tokens must be at most 100,000"),
    usage("inspect run text.txt --attention-tokens=-1", "--attention-tokens must be 0 or more"),
    failure("inspect run text.txt --html taken.json", "taken.json exists already"),
    failure("score run nowhere.txt", "there is no file nowhere.txt"),
    failure("score run taken", "taken is a folder"),
    failure("report nowhere", "there is no run folder nowhere"),
    usage("bench --steps 0", "--steps must be at least 1"),
    usage("bench --steps=-1", "--steps must be at least 1"),
    usage("bench tiny.toml --batch-size two", "'training.batch_size' must be a whole number"),
    usage("bench tiny.toml --batch-size 0", "batch_size"),
    usage("bench tiny.toml --block-length=-4", "block_length"),
    usage("bench tiny.toml --training.device cpu", "--training.device is for training: use --device"),
    usage("bench tiny.toml --batch-size 2 --training.batch-size 2", "the same option"),
    usage("bench tiny.toml --model.widht 8", "unknown key 'model.widht'"),
    failure("bench tiny.toml --json taken.json", "taken.json exists already"),
    failure("bench tiny.toml --json taken", "taken exists already"),
    failure("bench no-such-recipe", "unknown recipe 'no-such-recipe'"),
    failure("bench tiny.toml no-such-recipe", "unknown recipe 'no-such-recipe'"),
    failure("bench text.txt", "recipe"),
    # devices
    *(
        failure([*COMMANDS[name], "--device", device], "there is no device '")
        for name in WITH_DEVICE
        for device in ("gpu", "", "cuda:99", "meta", "cpu cpu", "cpu:-1", "\u00e9")
    ),
    failure("cutoffs text.txt --clusters 2 --cost time --device gpu", "there is no device 'gpu'"),
    failure("train tiny.toml --out new --training.device gpu", "there is no device 'gpu'"),
    # plugins
    *(
        failure([*COMMANDS[name], "--plugin", "no_such_plugin"], "there is no plugin 'no_such_plugin'")
        for name in WITH_PLUGINS
    ),
    *(
        failure(["recipes", "--plugin", plugin], "is not a valid plugin name")
        for plugin in ("", "a.py", "../a", "a b", "class", "a..b", ".a", "a/b", "a\nb", "\x1b[31m")
    ),
    # control characters are shown, and no line is endless
    *(usage([*words, "a\x00b"], "NUL character") for words in COMMANDS.values()),
    usage(["\x1b[31mred"], r"unknown command '\\x1b\[31mred'"),
    usage(["two\nlines"], r"unknown command 'two\\nlines'"),
    usage(["x" * 100_000], r"^.{,2100}$"),
    # one option twice
    *(
        usage([*COMMANDS[name], option, "cpu", option, "cpu"], f"{option}.* twice")
        for name in WITH_DEVICE
        for option in ("--device",)
    ),
    usage("train tiny.toml --out new --out new", "--out.* twice"),
    usage("train tiny.toml --out new --model.width 8 --model.width 8", "model.width.* twice"),
    usage("train tiny.toml --out new --data text.txt --data.corpus text.txt", "same option"),
    failure("recipes --plugin os.nothing", "there is no plugin 'os.nothing'"),
]
