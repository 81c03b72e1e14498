"""The linear loss: a language model's head and its entropy loss together, chunk by chunk of rows."""
