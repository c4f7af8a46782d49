"""The version of this package: packaging, run folders and `--version` read it here."""

VERSION = "0.1.0"
