"""Earlier place of the functions of `silodp.config.build`."""

from silodp.config.build import (
    build,
    convert_validation_error,
    get_fields,
    get_table_class,
    make_unknown_error,
    validate_arguments,
)

__all__ = [
    "build",
    "convert_validation_error",
    "get_fields",
    "get_table_class",
    "make_unknown_error",
    "validate_arguments",
]
