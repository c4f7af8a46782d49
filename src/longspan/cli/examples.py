"""One example for the help of every command."""

from __future__ import annotations

EXAMPLES = {
    "longspan": "longspan train --data my.txt --out runs/mine",
    "longspan train": "longspan train quickstart --data my.txt --out runs/mine --model.num-layers 4",
    "longspan search": "longspan search wikitext2-par-search --out runs/hunt --top 5",
    "longspan eval": "longspan eval runs/mine --split valid --json",
    "longspan generate": "longspan generate runs/mine --prompt 'def ' --tokens 100 --samples 3",
    "longspan spans": "longspan spans runs/mine --out spans.png",
    "longspan attention": "longspan attention runs/mine my.txt --out attention.png",
    "longspan report": "longspan report runs/mine runs/other --out comparison.html",
    "longspan inspect": "longspan inspect runs/mine my.txt --html my.html",
    "longspan score": "longspan score runs/mine a.txt b.txt --json",
    "longspan data": "longspan data list",
    "longspan data list": "longspan data list --json",
    "longspan data get": "longspan data get text8",
    "longspan data add": "longspan data add novels texts/novels",
    "longspan data remove": "longspan data remove novels",
    "longspan data clean": "longspan data clean --downloads",
    "longspan data info": "longspan data info my.txt --tokenizer bpe --vocabulary-size 4000",
    "longspan cutoffs": "longspan cutoffs wikitext-103 --clusters 4",
    "longspan recipes": "longspan recipes quickstart > mine.toml",
    "longspan runs": "longspan runs runs --json",
    "longspan import": "longspan import checkpoint.pt --kind adaptive-span --data enwik8 --out runs/theirs",
    "longspan completion": "longspan completion bash > longspan.bash",
    "longspan serve": "longspan serve runs/mine --port 8000",
    "longspan bench": "longspan bench quickstart --decode --json figures.json",
}
