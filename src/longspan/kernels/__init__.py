"""Operations with a slow specification and fast backends, one folder each."""
