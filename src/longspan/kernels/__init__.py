"""Operations that have a slow specification and fast paths: one folder each."""
