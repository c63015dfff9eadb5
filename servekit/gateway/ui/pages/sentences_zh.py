"""Sentences of other processes in Chinese: reasons of workers and models, refusals of requests.

They arrive as finished English sentences. One that no pattern here matches stays as it is.
"""

from __future__ import annotations

import re

#: What a sentence matches as a whole, and its translation; groups are translated in turn.
_PATTERNS: tuple[tuple[str, str], ...] = (
    # ---- ends of processes
    (r"killed by (\w+)", "被 {0} 终止"),
    (
        r"killed by (\w+), probably by the kernel: out of memory",
        "被 {0} 终止，很可能是内核因内存不足所为",
    ),
    (r"exit code (\d+)", "退出码 {0}"),
    (r"exit code (\d+): (.+)", "退出码 {0}：{1}"),
    (r"(.+) before it was ready, while it loaded (.+)", "{0}（就绪之前，正在加载 {1}）"),
    (r"(.+) before it was ready", "{0}（就绪之前）"),
    (r"(.+) before it was ready: (.+)", "{0}（就绪之前）：{1}"),
    (
        r"stalled: no progress for ([\d.]+) s with (\d+) requests? running",
        "停滞：{0} 秒没有进展，当时有 {1} 个请求运行中",
    ),
    (r"stalled: no progress for ([\d.]+) s while loading", "停滞：加载中 {0} 秒没有进展"),
    (r"silent: no answer to a ping for ([\d.]+) s", "无响应：{0} 秒没有回应"),
    (r"silent: no answer to a ping for ([\d.]+) s while loading", "无响应：加载中 {0} 秒没有回应"),
    (
        r"crash loop: (\d+) processes in a row died before completing a request "
        r"\(the last: (.+)\); last attempt at ([\d:]+), next attempt at ([\d:]+)",
        "反复崩溃：连续 {0} 个进程在完成请求之前退出（最近一次：{1}）；上次尝试 {2}，下次尝试 {3}",
    ),
    (r"cannot be started: (.+)", "无法启动：{0}"),
    # ---- where a model is
    (r"stopped at ([\d:]+): (.+)", "{0} 停止：{1}"),
    (r"asleep since ([\d:]+): (.+)", "{0} 起休眠：{1}"),
    (r"unused for (\d+) s", "{0} 秒未使用"),
    (r"by an operator", "由管理员操作"),
    (r"stopped by an operator", "由管理员停止"),
    (r"as its client had asked", "按客户端的要求"),
    (r"evicted for ([^,]+), ([^,]+) needed, ([^,]+) free", "让位给 {0}：需要 {1}，空闲 {2}"),
    (r"its workers have failed", "它的工作进程都已失败"),
    (r"servekit is shutting down", "servekit 正在关闭"),
    # ---- refusals of requests
    (r"the model '(.+)' cannot serve: (.+)", "模型 {0} 无法服务：{1}"),
    (r"the model '(.+)' is not ready yet: (.+)", "模型 {0} 尚未就绪：{1}"),
    (
        r"the model '(.+)' is not loaded; the operator's `(.+)` does it",
        "模型 {0} 未加载；管理员可用命令 {1} 加载",
    ),
    (r"the adapter '(.+)' cannot serve: (.+)", "适配器 {0} 无法服务：{1}"),
    (r"the adapter '(.+)' is being loaded", "适配器 {0} 正在加载"),
    (r"it is stopped", "已停止"),
    (r"it waits for memory", "正在等待内存"),
    (
        r"the model '(.+)' is not served here; the models are: (.+)",
        "这里没有模型 {0}；可用的模型：{1}",
    ),
    (r"no model is served yet", "还没有可用的模型"),
    (
        r"'(.+)' has no chat template; use /v1/completions",
        "{0} 没有对话模板；请使用 /v1/completions",
    ),
    (r"not done within ([\d.]+) s; it was .+", "{0} 秒内没有完成"),
    (r"(\d+) requests wait for '(.+)' already; try later", "已有 {0} 个请求在等待 {1}，请稍后再试"),
    (
        r"the key '(.+)' has (\d+) requests under way already, its limit",
        "密钥 {0} 已有 {1} 个请求进行中，达到上限",
    ),
    (r"this API key is not known here", "此 API 密钥在这里无效"),
    (r"this session is over; sign in again", "登录已过期，请重新登录"),
    (
        r"The prompt has (\d+) tokens, and this model's context has room for (\d+), "
        r"with at least one for the answer\.",
        "提示词有 {0} 个词元，此模型的上下文只能容纳 {1} 个，其中至少一个留给回答。",
    ),
    (
        r"the worker died in the middle of the answer, and this model's engine cannot continue it"
        r" elsewhere; send the request again",
        "工作进程在回答途中退出，此模型的引擎无法继续回答；请重新发送",
    ),
    (
        r"its worker ended, and the model is no longer served",
        "它的工作进程已结束，此模型不再提供服务",
    ),
    # ---- what is wrong in a page's fields
    (r"write some texts first, one on each line", "请先写一些文本，每行一条"),
    (r"(\d+) texts are over the limit of (\d+) on this page", "{0} 条文本超过了此页 {1} 条的上限"),
    (r"max_tokens: at most (\d+) on this page", "max_tokens：此页最多 {0}"),
    # ---- recordings
    (r"file: it cannot be read as audio: (.+)", "无法作为音频读取：{0}"),
    (r"WAV, FLAC, Ogg and MP3 are read", "可读取 WAV、FLAC、Ogg 和 MP3"),
    (r"it is a WAV file without samples", "这是没有采样的 WAV 文件"),
    (r"file: the recording is empty", "录音是空的"),
    (r"file: the recording is cut short: .+; send all", "录音不完整：文件头声明的数据比实际的多"),
    (r"file: the recording is longer than ([\d.]+) s; .+", "录音超过了 {0} 秒"),
    (
        r"file: only WAV is read here; other formats need the package soundfile: (.+)",
        "这里只能读取 WAV；其他格式需要 soundfile：{0}",
    ),
    (
        r"language: this model does not know '(.+)'; it knows (.+)",
        "此模型不支持语言 {0}；支持的语言：{1}",
    ),
    (r"this model hears English only, and does not translate", "此模型只识别英语，不能翻译"),
    (
        r"the body is over the limit of (\d+) bytes; .+",
        "请求超过了 {0} 字节的上限；请缩小，或调高 server.max_body_bytes",
    ),
    (r"an internal error; see the logs", "内部错误，详见日志"),
    # ---- tools of MCP servers
    (r"the tools of (.+) cannot be used: (.+)", "无法使用 {0} 的工具：{1}"),
    (r"the model called tools (\d+) times for one question", "模型为一个问题调用了 {0} 轮工具"),
    (r"there is no such server any more", "此服务器已不存在"),
    (r"this needs a key with `tools: true`", "需要带有 `tools: true` 的密钥"),
    (
        r"a server by its address needs a key with `admin: true`",
        "按地址使用服务器需要带有 `admin: true` 的密钥",
    ),
    (r"it did not start within ([\d.]+) s", "{0} 秒内没有启动"),
    (r"(.+); it is tried again in (\d+) s", "{0}；{1} 秒后重试"),
)
_COMPILED = [(re.compile(pattern, re.DOTALL), words) for pattern, words in _PATTERNS]
#: Parts in parts of a sentence that are translated; a deeper one is not ours.
_MOST_DEPTH = 4


def translate_sentence(sentence: str, depth: int = 0) -> str:
    """Return a sentence in Chinese; one that is not known as it is."""
    for pattern, words in _COMPILED:
        if depth < _MOST_DEPTH and (found := pattern.fullmatch(sentence)):
            return words.format(*(translate_sentence(part, depth + 1) for part in found.groups()))
    return sentence
