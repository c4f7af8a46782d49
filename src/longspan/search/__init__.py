"""The architecture search and its results."""

from longspan.search.findings import Findings, read_findings, write_findings
from longspan.search.recipe import found_recipe
from longspan.search.strategy import Searching

__all__ = ["Findings", "Searching", "found_recipe", "read_findings", "write_findings"]
