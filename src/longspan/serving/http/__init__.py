"""The HTTP interface of the server: one file per topic. FastAPI is imported only here."""
