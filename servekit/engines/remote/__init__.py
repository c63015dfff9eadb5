"""A remote endpoint that speaks OpenAI's API, as `servekit.engines.remote.engine` asks it.

bodies    what it is asked, from a request as it came
pace      how often it is asked
endpoint  asking it: HTTP, what is tried again, what ends an attempt
refusals  what becomes of its errors
events    its stream, as server-sent events
chunks    the JSON in them
answers   what they say
reading   from the bytes to that
embeddings  the same of vectors
greeting  the first words with it
watch     whether it serves, while nobody asks
"""
