"""Operations on rows of the table: the search for touched rows, and the gather, push and merge of rows."""
