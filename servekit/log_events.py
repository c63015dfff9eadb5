"""The catalogue of log events: the name of each event, and its sentence for people.

A log call names an event and gives its fields: `log.info("worker_ready", child=name, after_s=2.5)`.
JSON logs hold both as they are; a terminal shows the sentence. The names are stable: programs
filter by them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: A line that a child wrote without servekit's logging, and a record of a library; the field `text`
#: holds it.
OUTPUT, LIBRARY = "output", "library_logged"
#: Sentences by event. `{name}` stands for a field. A part in brackets is left out where a field in
#: it is absent or null; the text after `|` takes its place.
EVENTS = {
    OUTPUT: "{text}",
    LIBRARY: "{text}",
    # the life of an instance
    "up": "All that the configuration names is up at {url}",
    "legacy_port_open": "Older clients are answered at {url}",
    "run_dir_replaced": "The run directory {path} is used instead: {reason}",
    "run_dir_restored": "The run directory had been removed, and is restored",
    "run_dir_not_restored": "The run directory was removed, and cannot be restored: {reason}",
    "control_socket_restored": "The socket for commands had been removed, and is restored: {path}",
    "control_socket_unavailable": "Commands cannot reach the supervisor: {reason}",
    "control_answer_failed": "A command cannot be answered",
    "children_not_recorded": "The processes cannot be recorded in the run directory: {reason}",
    "shared_memory_not_recorded": "Shared memory cannot be recorded: {reason}",
    "shared_memory_removed": "Removed shared memory that the process left ({segments} segments)",
    "orphan_guard_restarted": "The orphan guard had died, and is started again",
    "display_failed": "A line cannot be shown",
    "open_files_scarce": "The process has {open_files} files and connections open, and may have"
    " {limit}. Then connections are refused and nothing can be started: raise the limit"
    " (`ulimit -n`, or LimitNOFILE= of systemd)",
    "measurement_failed": "A measurement failed",
    "tick_failed": "A periodic check failed",
    "gpu_driver_unresponsive": "The GPU driver does not answer: {reason}",
    "journal_unwritable": "Events cannot be kept in {file}: {reason}",
    "journal_recovered": "Events are kept in {file} again",
    "log_file_unwritable": "The log {file} cannot be written, lines are lost: {reason}",
    "log_file_recovered": "The log {file} is written again; {lost_lines} lines were lost",
    "tool_called": "The tool {tool} of {server} was called[ by {key}] ({took_s} s)",
    "request_finished": "{status} {endpoint}[ {model}][ by {key}][: {prompt_tokens} + "
    "{completion_tokens} tokens] in {total_s} s",
    "requests_not_shown": "{count} further requests in this second; `servekit requests` has all but"
    " {lost} of them",
    "responses_unwritable": "Responses or batches cannot be kept in {file}: {reason}",
    "background_interrupted": "The response {response} was interrupted, and goes on",
    "batch_interrupted": "The batch {batch} was interrupted, and goes on: {reason}",
    "usage_unwritable": "The usage of keys cannot be kept in {file}: {reason}",
    "request_log_unwritable": "The request log {file} cannot be written: {reason}",
    "requests_finishing": "Requests to finish: {in_flight}. Press Ctrl-C again to stop now",
    "supervisor_draining": "Stopping; requests in flight have {at_most_s} s to finish",
    "shutdown_forced": "Stopping now; requests in flight are cut off",
    "processes_stuck": "These processes were killed, but are stuck in the kernel: {children}",
    "supervisor_stopped": "Stopped",
    # processes
    "process_started": "Started with PID {pid}",
    "servekit_upgraded": "The process is of a newer version than its supervisor, as servekit was"
    " upgraded while this instance ran: restart the instance",
    "process_progressed": "Loading: {progress}",
    "gateway_ready": "The gateway serves after {after_s} s",
    "worker_ready": "The worker serves on {device} after {after_s} s",
    "standby_ready": "The standby can fork workers",
    "fork_failed": "The worker cannot be forked from its standby: {reason}",
    "fork_refused": "Workers are not forked from the standby: {reason}",
    "process_stalled": "The process makes no progress and is replaced: {reason}",
    "process_exited": "The process ended and is [started again in {again_in_s} s|not started again]"
    ": {reason}",
    "worker_start_failed": "The worker's start broke off",
    "supervision_failed": "Starting or watching the process broke off; it is started again",
    "process_start_failed": "The process could not start and is"
    " [tried again in {again_in_s} s|not tried again]: {reason}",
    "worker_draining": "The worker is to end; its requests have {at_most_s} s to finish",
    "worker_unloading": "The worker is unloaded",
    "worker_load_cancelled": "No request waits for the worker; its load is cancelled",
    "breaker_opened": "The circuit breaker of {model} is open: {reason}",
    "breaker_half_opened": "The circuit breaker of {model} is half-open; {probe} is tried",
    "breaker_closed": "The circuit breaker of {model} is closed",
    "gpu_memory_stray": "The worker uses memory of a GPU that is not its own: it {reason}",
    "gpu_memory_over_claim": "The worker uses more GPU memory than it claimed: it {reason}",
    "gpu_memory_not_released": "The worker has ended, but its GPU memory is not free yet",
    # models
    "engine_chosen": "The engine of {model} is {engine}: {why}",
    "model_scaled": "The number of replicas of {model} is now {replicas}: {reason}",
    "model_loading": "Loading {model}",
    "model_unloading": "Unloading {model}: {reason}",
    "model_sleeping": "Putting {model} to sleep: {reason}",
    "model_sleep_failed": "{model} cannot be put to sleep: {reason}",
    "model_wake_failed": "{model} cannot be woken: {reason}",
    "worker_asleep": "The worker sleeps after {after_s} s",
    "worker_awake": "The worker is awake after {after_s} s",
    "reload_completed": "The configuration was reloaded: {changes}",
    "reload_refused": "The reload is refused: {reason}",
    "reload_failed": "The reload failed",
    "model_reload_failed": "The reload of {model} failed, and the old version serves on: {reason}",
    "model_change_failed": "A change of {model} failed",
    "rollout_cuts_requests": "There is no memory for both versions of {model}: requests of"
    " {workers} are cut off after {at_most_s} s (server.drain_timeout_s)",
    "adapter_kept": "The adapter {adapter} is kept",
    "adapter_serving": "The adapter {adapter} serves",
    "adapter_loaded": "The adapter {adapter} is loaded",
    "adapter_unloaded": "The adapter {adapter} is unloaded",
    "adapter_refused": "The adapter {adapter} is refused: {reason}",
    "adapter_failed": "The adapter {adapter} has failed: {reason}",
    "adapter_change_failed": "An adapter cannot be changed: {order}",
    # gateways
    "worker_connected": "Connected to {worker}",
    "worker_unreachable": "{worker} cannot be reached: {error}",
    "worker_lost": "The connection to {worker} is lost, and {sent_elsewhere} of its {in_flight}"
    " requests are sent elsewhere: {error}",
    "supervisor_lost": "The connection to the supervisor is lost: {error}",
    "request_quarantined": "A request to {model} is quarantined for {for_s} s: workers died of it"
    " {deaths} times",
    "source_quarantined": "All requests of {source} to {model} are quarantined for {for_s} s",
    "unexpected_error": "A request failed with an unexpected error",
    "stream_cut_off": "A stream was cut off: {error}",
    "prompt": "A request to {model} has the prompt: {prompt}",
    "unknown_parameters_ignored": "Unknown parameters of a request have no effect: {names}",
    "too_many_bodies": "Large requests are refused: {bodies} are being received at once",
    "too_many_connections": "Idle connections are closed: there are {connections}, and at most"
    " {at_most} are allowed",
    "client_not_reading": "The client {address} does not read its response and is disconnected",
    "certificate_unreadable": "The certificate cannot be read, and the old one stays: {reason}",
    "ui_failed": "The chat page cannot start",
    "tracing_unavailable": "Requests are not traced, since the extra `otel` is missing: {error}",
    "metrics_unavailable": "The dashboard has no metrics: {reason}",
    "sign_in_failed": "A sign-in from {address} had a wrong key",
    "sign_in_succeeded": "The key {key} signed in from {address}",
    "reload_requested": "A reload was requested over HTTP",
    "profile_requested": "The profile {name} was requested over HTTP",
    "profile_not_recorded": "The profile cannot be recorded for a start after a crash: {reason}",
    "restart_requested": "A restart of {name} was requested over HTTP",
    "residency_requested": "For {model}, {want} was requested over HTTP",
    "adapter_load_requested": "The adapter {adapter} of {path} was requested",
    "adapter_unload_requested": "The removal of the adapter {adapter} was requested",
    # workers
    "boot_failed": "The model cannot be loaded",
    "engine_asleep": "The engine sleeps",
    "engine_awake": "The engine is awake",
    "sleep_change_failed": "The engine failed to sleep or wake: {order}",
    "engine_died": "The engine died: {cause}",
    "request_refused": "The engine failed to take the request {request}",
    "request_output_failed": "The output of the request {request} cannot be sent",
    "gateway_connection_broken": "The connection to a gateway was closed: {error}",
    "worker_socket_restored": "The worker's socket had been removed, and is restored: {path}",
    "fault_injection_unsupported": "No step is made to fail: {reason}",
    # connections to other machines
    "listening": "Listening at {address}",
    "supervisor_attached": "The supervisor has connected",
    "connection_timed_out": "The connection of {peer} was closed, since nothing was received",
    "connection_refused": "A connection was refused: {reason}",
    "certificate_renewed": "The certificate was renewed, and is valid for {valid_for_s} s",
    "control_channel_lost": "The control connection is lost: {error}",
    "control_channel_restored": "The control connection is restored",
    "stack_dump_missing": "There is no stack dump: {error}",
    "exit_unknown": "The launcher cannot tell how the process ended: {error}",
    "kill_unconfirmed": "It is not confirmed that the process has ended: {error}",
    # Ray
    "ray_joined": "Joined the Ray cluster of {nodes} nodes",
    "ray_nodes_changed": "The Ray cluster has {nodes} nodes now",
    "ray_nodes_unknown": "Ray does not list its nodes: {reason}",
    "ray_request_failed": "Ray refused a request",
    "node_unsuitable": "Nothing is placed on the node {node}: {reason}",
    "node_lost": "The node {node} is gone, and its gateway with it",
    "node_gateway_starting": "A gateway starts on the node {node}",
    "actor_adopted": "The actor of {worker} was found, and is adopted",
    "actor_lost": "The actor of {worker} is lost: {reason}",
    "placement_released": "The unused placement of {worker} is released",
    "placement_not_released": "The placement of {worker} cannot be released: {reason}",
    "takeover_completed": "The {gateways} gateways of the last supervisor are no longer needed",
    # engines
    "engine_core_died": "vLLM's engine core has died",
    "core_host_failed": "vLLM's engine core starts anew, as its prepared process failed: {reason}",
    "vllm_served_by_its_server": "{reason}; its own server serves instead",
    "vllm_version_untested": "vLLM {version} was not tested with servekit, only {tested}",
    "tokenizer_library_used": "Texts are tokenised by {library}",
    "tokenizer_library_unused": "Texts are not tokenised by {library}: {reason}",
    "structured_output_unavailable": "Structured output is not available: {reason}",
    "request_preempted": "The KV cache is full, and the request {request} is computed again later",
    "logits_not_a_number": "A request among {requests} computes values that are not numbers (NaN)",
    "library_load_failed": "The library {path} cannot be loaded: {reason}",
    "images_prepared": "{model} reads {detail}",
    "images_unavailable": "{model} takes no images, as they cannot be read: {reason}",
    "recordings_unavailable": "{model} takes no recordings, as they cannot be read: {reason}",
    "sampling_default_ignored": "{name}: {value} of the model's files is ignored, as it is not a"
    " number from {least} to {most}",
    "model_files_unidentified": "The files of {path} cannot be identified: {reason}",
    "model_files_awaited": "Another worker prepares the same model, {entry}, and is awaited",
    "cache_entry_damaged": "The cache entry {path} is damaged, and is made again",
    "cache_leftover_removed": "Removing {path}, which a dead worker left",
    "hub_commit_resolved": "Serving {repo} at the commit {commit}",
    "hub_commit_pinned": "Serving {repo} at the commit {commit}, where {revision} was when it was"
    " first fetched; to follow it, name a commit in the configuration or delete {file}",
    "hub_file_damaged": "{path} has not the {size_bytes} bytes that the hub states, and is fetched"
    " again",
    "hub_unreachable": "The hub cannot be reached, and {repo} is served as cached: {reason}",
    "prefetch_failed": "The model cannot be fetched ahead: {reason}",
    "package_fetch_started": "Fetching {requirement}",
    "conversion_started": "Converting {file} to safetensors, once",
    "endpoint_request_failed": "A request to the endpoint failed",
    "speculation_failed": "Speculative decoding is off until the worker starts again: {reason}",
    "adapter_kernels_failed": "Adapters decode without CUDA graphs: {reason}",
    "cuda_graph_failed": "A step cannot be recorded as a CUDA graph: {reason}",
    "layer_merge_failed": "The layer {layer} cannot be merged: {reason}",
    "texts_run_without_graphs": "{model} runs without CUDA graphs: its vectors would be others",
    "texts_run_alone": "{model} reads one text at a time: it would read the padding of a batch",
    "weights_not_packed": "{model} runs with its weights as they are: {reason}",
    "weight_packing_failed": "The weights cannot be packed, and stay as they are: {reason}",
    "layer_not_fused": "A layer's operation runs as transformers has it: {reason}",
    "layers_fused": "{norms} kinds of norms and {rotary} rotary embeddings are fused",
    "packed_attention_unavailable": "Prompts are read one by one: {reason}",
    "warm_up_failed": "No memory to read {tokens} tokens in one step: {reason}",
    "batching_test_failed": "{model} cannot run with {mode}, which failed its test: {reason}",
    "sequential_mode_chosen": "{model} runs one request at a time: {reason}",
    "server_answered": "{model} is served by {detail}",
    "continuous_batching_chosen": "{model} runs with {detail}",
    "kv_cache_allocation_failed": "There is no room for the KV cache as planned: {reason}",
    "page_lock_failed": "The host's memory cannot be page-locked; sleeping and waking take longer",
    "abort_failed": "A request cannot be aborted: {reason}",
    "embedding_submit_failed": "Texts cannot be sent to the engine: {reason}",
}
_FIELD = re.compile(r"\{(\w+)\}")
_EMPTY: tuple[Any, ...] = (None, "", [])
_OPTIONAL = re.compile(r"\[([^]|]*)\|?([^]]*)\]")


def sentence(event: str, fields: Mapping[str, Any]) -> str:
    """Return an event for people: its sentence, and as NAME=VALUE the other fields with a value.

    An event that is not in the catalogue, such as a plugin's, is its own sentence.
    """
    template = EVENTS.get(event)
    said = event if template is None else _fill(template, fields)
    in_it = () if template is None else _FIELD.findall(template)
    rest = {key: value for key, value in fields.items() if key not in in_it}
    shown = (f"{key}={_shown(value)}" for key, value in rest.items() if value not in _EMPTY)
    return " ".join((said, *shown))


def _fill(template: str, fields: Mapping[str, Any]) -> str:
    def choose(part: re.Match[str]) -> str:
        known = all(fields.get(name) is not None for name in _FIELD.findall(part[1]))
        return part[1] if known else part[2]

    return _FIELD.sub(
        lambda field: _shown(fields.get(field[1], "?")), _OPTIONAL.sub(choose, template)
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{round(value, 2):.12g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
