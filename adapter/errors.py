"""The tree of errors, each with the HTTP status and the code that a client sees.

AdapterError
├── UnprocessableError      422  a field is missing, unknown, out of range, or does not fit
├── UnauthorizedError       401
├── ForbiddenError          403  a key that may not do this
├── RequestTimeoutError     408  the body came too slowly
├── TooLargeError           413  found while reading
├── NotAudioError           415  the bytes are no audio that can be decoded
├── TooManyRequestsError    429  of one key; with Retry-After
├── AudioUnavailableError   502  the audio URL did not answer with the file
├── UnavailableError        503  with Retry-After
│   └── EngineError              the engine failed; the prompt had no part in it
│       ├── EngineOutOfMemoryError   a smaller group may fit
│       └── EngineDeadError          nothing will answer until the engine is started anew
└── DeadlineExceededError   504

SettingsError                    stops the start with one line
"""


class AdapterError(Exception):
    """An error that a client may see.

    `message` is a sentence that says what to do; `field` is the path of the field at fault
    (`prompts.3.top_p`), or None.
    """

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, code: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.field = field


class UnprocessableError(AdapterError):
    status = 422
    code = "invalid_request"


class EngineCrashedError(UnprocessableError):
    code = "engine_crashed"


class UnauthorizedError(AdapterError):
    status = 401
    code = "unauthorized"


class ForbiddenError(AdapterError):
    status = 403
    code = "forbidden"


class RequestTimeoutError(AdapterError):
    status = 408
    code = "request_timeout"


class TooLargeError(AdapterError):
    status = 413
    code = "too_large"


class NotAudioError(AdapterError):
    status = 415
    code = "not_audio"


class TooManyRequestsError(AdapterError):
    status = 429
    code = "too_many_requests"

    def __init__(self, message: str, *, code: str, retry_after_seconds: int = 5) -> None:
        super().__init__(message, code=code)
        self.retry_after_seconds = retry_after_seconds


class AudioUnavailableError(AdapterError):
    status = 502
    code = "audio_unavailable"


class UnavailableError(AdapterError):
    status = 503
    code = "unavailable"
    retry_after_seconds = 5


class NotMeasuredError(UnavailableError):
    code = "not_measured"


class EngineError(UnavailableError):
    code = "engine_error"


class EngineOutOfMemoryError(EngineError):
    code = "out_of_memory"


class EngineDeadError(EngineError):
    code = "engine_dead"


class DeadlineExceededError(AdapterError):
    status = 504
    code = "deadline_exceeded"


class SettingsError(Exception):
    """Stops the start: the message names the variable, its value and what was expected."""
