"""Mistakes with checkpoints of other projects: `import` runs nothing from a file."""

from __future__ import annotations

from tests.abuse.mistake import failure, usage

KINDS = ("adaptive-span", "fairseq-adaptive-span", "sha-rnn", "transformer-xl", "hf-transfo-xl", "gpt-spans")
FILES = (
    "empty",
    "text",
    "folder",
    "nothing",
    "list",
    "tensor",
    "foreign",
    "cut",
    "flipped",
    "code",
    "code-zip",
    "nan",
)

MISTAKES = [
    *(
        failure(f"import checkpoints/{file}.pt --kind {kind} --out new", rf"{file}\.pt")
        for kind in KINDS
        for file in FILES
    ),
    failure("import nowhere.pt --kind sha-rnn --out new", "nowhere.pt"),
    failure("import circle.txt --kind sha-rnn --out new", "circle.txt"),
    usage("import --out new", "give a checkpoint FILE"),
    usage("import checkpoints/foreign.pt --pretrained enwik8 --out new", "give a checkpoint FILE"),
    usage("import checkpoints/foreign.pt --out new", "--kind"),
    usage("import checkpoints/foreign.pt --kind gpt-5 --out new", "gpt-5"),
    usage("import checkpoints/foreign.pt --kind '' --out new", "kind"),
    usage("import --pretrained no-such-model --out new", "no-such-model"),
    usage("import --pretrained '' --out new", "."),
    usage("import --pretrained enwik8 --kind sha-rnn --out new", "drop --kind"),
    usage("import checkpoints/foreign.pt --kind sha-rnn --out ''", "."),
    failure("import checkpoints/foreign.pt --kind sha-rnn --out taken", "taken exists already"),
    failure("import checkpoints/foreign.pt --kind sha-rnn --out run", "run exists already"),
    failure("import checkpoints/foreign.pt --kind sha-rnn --out missing/new", "missing|foreign"),
    failure(
        "import checkpoints/foreign.pt --kind hf-transfo-xl --config nowhere.json --out new", "nowhere.json"
    ),
    failure(
        "import checkpoints/foreign.pt --kind hf-transfo-xl --config checkpoints/bad.json --out new",
        "bad.json",
    ),
    failure(
        "import checkpoints/foreign.pt --kind hf-transfo-xl --config checkpoints/list.json --out new",
        "list.json",
    ),
    failure(
        "import checkpoints/foreign.pt --kind hf-transfo-xl --config checkpoints/deep.json --out new",
        "deep.json",
    ),
    failure("import checkpoints/foreign.pt --kind hf-transfo-xl --config pipe --out new", "pipe"),
    failure("import checkpoints/foreign.pt --kind hf-transfo-xl --config taken --out new", "taken"),
    failure("import pipe --kind sha-rnn --out new", "pipe"),
    failure("import /dev/zero --kind sha-rnn --out new", "/dev/zero"),
    failure(
        "import checkpoints/foreign.pt --kind sha-rnn --data nowhere.txt --out new", "nowhere.txt|foreign.pt"
    ),
]
