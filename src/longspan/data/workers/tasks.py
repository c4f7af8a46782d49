"""What worker processes can do. Every task has settings and gives a function from bytes to bytes."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

Work = Callable[[bytes], bytes]
UTF_8 = ("utf-8", "surrogatepass")  # bytes of a text that are not UTF-8 are lone surrogates


def encode(folder: str) -> Work:
    """A text of a split -> token ids, with the tokenizer that was saved in `folder`."""
    import numpy as np

    from longspan.data.tokenizers import id_type, load_tokenizer
    from longspan.data.tokenizers.interface import TextTokenizer

    tokenizer = load_tokenizer(Path(folder))
    assert isinstance(tokenizer, TextTokenizer)
    dtype = id_type(tokenizer.vocabulary_size)
    return lambda text: np.ascontiguousarray(
        tokenizer.encode_text(text.decode(*UTF_8)), dtype=dtype
    ).tobytes()


def count_words() -> Work:
    """A text -> its words and how often each occurs, in order of first appearance."""
    from longspan.data.tokenizers.vocabulary import words_of

    return lambda text: json.dumps(Counter(words_of(text.decode(*UTF_8)))).encode()


def text_file(field: str | None) -> Work:
    """The path of a file -> the path of its text, which is checked, unpacked and extracted."""
    from longspan.data.local import text_of

    return lambda path: os.fsencode(text_of(Path(os.fsdecode(path)), field))


TASKS: dict[str, Callable[..., Work]] = {
    "encode": encode,
    "count-words": count_words,
    "text-file": text_file,
}
