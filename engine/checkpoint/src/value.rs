//! One metadata value as it lies in the file: a number's bits, or where a string or array is.

use std::fmt;
use std::ops::Range;

use crate::cursor::Cursor;
use crate::error::GgufError;

/// Deepest nesting of arrays. Real files have none; the bound keeps the walk's recursion small.
const MAX_ARRAY_DEPTH: u32 = 4;

/// The type of a metadata value. The discriminants are the file's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    fn from_id(id: u32) -> Option<ValueType> {
        use ValueType::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64].get(id as usize).copied()
    }

    /// Bytes of a number or Boolean; `None` for strings and arrays.
    pub(crate) fn width(self) -> Option<usize> {
        use ValueType::*;
        match self {
            U8 | I8 | Bool => Some(1),
            U16 | I16 => Some(2),
            U32 | I32 | F32 => Some(4),
            U64 | I64 | F64 => Some(8),
            String | Array => None,
        }
    }

    /// Fewest bytes an element of this type can take: what bounds an array's count by the rest of the file.
    fn smallest_bytes(self) -> u64 {
        match self {
            ValueType::String => 8,
            ValueType::Array => 12,
            number => number.width().unwrap_or(1) as u64,
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            ValueType::Bool => "a Boolean",
            ValueType::String => "a string",
            ValueType::Array => "an array",
            ValueType::F32 | ValueType::F64 => "a float",
            _ => "an integer",
        };
        f.write_str(name)
    }
}

/// A value, found and validated; strings and arrays stay in the file.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// A number or Boolean: its bits, in the low end.
    Bits(ValueType, u64),
    /// UTF-8.
    String(Range<usize>),
    /// `count` elements in these bytes.
    Array { element: ValueType, count: usize, bytes: Range<usize> },
}

impl Value {
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::Bits(value_type, _) => *value_type,
            Value::String(_) => ValueType::String,
            Value::Array { .. } => ValueType::Array,
        }
    }

    /// Reads a value's type and the value. `key` is for messages.
    pub fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Value, GgufError> {
        let value_type = read_type(cursor, key)?;
        read_value(cursor, key, value_type, 0)
    }
}

fn read_type(cursor: &mut Cursor<'_>, key: &str) -> Result<ValueType, GgufError> {
    let id = cursor.u32("a metadata value's type")?;
    ValueType::from_id(id).ok_or_else(|| GgufError::ValueType { key: key.to_owned(), id })
}

fn read_value(cursor: &mut Cursor<'_>, key: &str, value_type: ValueType, depth: u32) -> Result<Value, GgufError> {
    match value_type.width() {
        Some(width) => {
            let bits = cursor.bits(width, "a metadata value")?;
            check_bool(key, value_type, bits)?;
            Ok(Value::Bits(value_type, bits))
        }
        None if value_type == ValueType::String => Ok(Value::String(cursor.string("a metadata string")?)),
        None => read_array(cursor, key, depth + 1),
    }
}

fn check_bool(key: &str, value_type: ValueType, bits: u64) -> Result<(), GgufError> {
    match (value_type, bits) {
        (ValueType::Bool, 2..) => Err(GgufError::Bool { key: key.to_owned(), found: bits as u8 }),
        _ => Ok(()),
    }
}

fn read_array(cursor: &mut Cursor<'_>, key: &str, depth: u32) -> Result<Value, GgufError> {
    if depth > MAX_ARRAY_DEPTH {
        return Err(GgufError::Nesting { key: key.to_owned(), limit: MAX_ARRAY_DEPTH });
    }
    let element = read_type(cursor, key)?;
    let count = cursor.u64("an array's length")?;
    let limit = cursor.remaining() as u64 / element.smallest_bytes();
    if count > limit {
        return Err(GgufError::Count { what: "an array's length", count, limit });
    }
    let start = cursor.position();
    match element.width() {
        // The bound above keeps this product within the file.
        Some(width) if element != ValueType::Bool => {
            cursor.range(count * width as u64, "an array")?;
        }
        _ => (0..count).try_for_each(|_| read_value(cursor, key, element, depth).map(drop))?,
    }
    Ok(Value::Array { element, count: count as usize, bytes: start..cursor.position() })
}
