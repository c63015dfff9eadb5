"""The engine for a remote endpoint with OpenAI's API.

request_builder  requests to the endpoint, from requests of the gateway
rate_limiter     limits of requests and tokens per minute
client           HTTP requests, retries and timeouts
errors           mapping of the endpoint's errors
schemas          JSON of chunks, completions and embeddings
response_parser  text, counts and end of an answer
reader           bytes of an answer to parsed chunks
handshake        first requests to the endpoint
health           health while there are no requests

Only the registry of `engines` and `engines.command` may import from here.
"""
