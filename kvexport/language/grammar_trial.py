"""Script that compiles an untrusted grammar in a separate process, to find out whether the compiler survives.

kvexport starts the script by its path. If a grammar makes the compiler crash, or run endlessly, no other request is
affected. The script reads a line of JSON: `path` (where to import from), `grammar`, `vocabulary` (the number of
tokens), `limits` (of llguidance), `seconds` (of processor time) and `bytes` (of memory). The script writes the error,
or nothing. It imports nothing of kvexport.
"""

import json
import os
import sys
import threading

_STACK = 2 << 20  # bytes, a quarter of a thread's stack: a grammar that passes here overflows no thread


class _Bytes:
    """A tokenizer with a token for every byte, and tokens without text for all other ids.

    This tokenizer is quick to build.
    """

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)

    def __init__(self, vocabulary: int) -> None:
        self.tokens = [bytes([i]) if i < 256 else b"" for i in range(vocabulary)]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _main() -> None:
    request = json.loads(sys.stdin.readline())
    sys.path[:] = request["path"]
    try:
        import resource
    except ImportError:  # Windows: the caller's clock bounds it alone
        pass
    else:
        os.nice(10)  # the cores belong to the model
        bounds = ((resource.RLIMIT_CPU, request["seconds"]), (resource.RLIMIT_AS, request["bytes"]))
        for kind, bound in ((resource.RLIMIT_CORE, 0), *bounds):
            hard = resource.getrlimit(kind)[1]  # which this process cannot raise
            least = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
            resource.setrlimit(kind, (least, least))
    import llguidance

    limits = llguidance.LLParserLimits(**request["limits"])
    size = max(request["vocabulary"], 257)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(size)), n_vocab=size)

    def compile_it() -> None:
        matcher = llguidance.LLMatcher(tokenizer, request["grammar"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        sys.stdout.write(matcher.get_error())

    threading.stack_size(_STACK)
    thread = threading.Thread(target=compile_it)
    thread.start()
    thread.join()


if __name__ == "__main__":
    _main()
