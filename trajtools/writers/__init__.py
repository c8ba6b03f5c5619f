"""Other forms of a recording: ATIF documents, Arrow and Parquet tables."""
