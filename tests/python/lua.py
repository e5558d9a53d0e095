"""Runs a Lua 5.1 script as Argo CD does: with base, table, package and os, and the globals `obj` and `actionParams`.

Reads {"script": text, "obj": ..., "actionParams": ...} and prints what the script returns, both in JSON.
"""

import json
import sys

from lupa.lua51 import LuaError, LuaRuntime, lua_type

ABSENT = ["math", "string", "io", "debug", "coroutine"]


def plain(value):
    """A Lua value as JSON knows it: a table with a first element is a list."""
    if lua_type(value) != "table":
        return value
    if value[1] is not None:
        return [plain(item) for item in value.values()]
    return {key: plain(item) for key, item in value.items()}


def main() -> None:
    request = json.load(sys.stdin)
    lua = LuaRuntime(register_eval=False, register_builtins=False)
    for library in ABSENT:
        lua.globals()[library] = None
    for name in ["obj", "actionParams"]:
        lua.globals()[name] = lua.table_from(request[name], recursive=True)
    try:
        print(json.dumps(plain(lua.execute(request["script"]))))
    except LuaError as error:
        sys.exit(str(error))


main()
