//! The names of element types, as numpy and torch have them.

use crate::model::DataType;

/// The element types of the native API by name.
#[derive(Clone, Copy, Debug)]
pub struct ElementTypes;

/// The first name of a type is the one that is shown.
const NAMES: [(&str, DataType); 14] = [
    ("float16", DataType::Float16),
    ("bfloat16", DataType::Bf16),
    ("float32", DataType::Float),
    ("float64", DataType::Double),
    ("int8", DataType::Int8),
    ("int16", DataType::Int16),
    ("int32", DataType::Int32),
    ("int64", DataType::Int64),
    ("uint8", DataType::Uint8),
    ("uint16", DataType::Uint16),
    ("uint32", DataType::Uint32),
    ("uint64", DataType::Uint64),
    ("bool", DataType::Bool),
    ("bool_", DataType::Bool), // the class of numpy 1
];

impl ElementTypes {
    /// The names of all types, for errors.
    pub const ALLOWED: &str = "\"float16\", \"bfloat16\", \"float32\", \"float64\", \"int8\" to \"int64\", \"uint8\" to \"uint64\" or \"bool\"";

    /// Returns the name of a type; that of the original's API for a type that the native API does not have.
    pub fn name(data_type: DataType) -> &'static str {
        NAMES.iter().find(|(_, of)| *of == data_type).map_or(data_type.name(), |(name, _)| name)
    }

    /// Returns the type with a name of the native API or of the original's.
    pub fn find(word: &str) -> Option<DataType> {
        NAMES.iter().find(|(name, of)| *name == word || of.name() == word).map(|(_, of)| *of)
    }
}
