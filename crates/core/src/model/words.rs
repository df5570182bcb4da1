//! How the callers of the two APIs call the arguments of one rule.
//!
//! A rule is written once, in `validate` or `plan`. Its text names arguments by the words of the API that was called.

use std::fmt::{self, Display};

use crate::error::Error;

/// An argument in a text.
#[derive(Clone, Copy, Debug)]
pub enum Argument<'a> {
    /// A parameter of the call: `name=value`, and `name[3]=value` for an entry of a list.
    Parameter(&'a str),
    /// Something that the object given for `parameter` says, at `location`: `location: noun value`. The noun may be empty.
    Within { parameter: &'a str, location: &'a str, noun: &'a str },
}

impl<'a> Argument<'a> {
    /// Returns the same argument for texts about all of it, and not about one entry.
    #[must_use]
    pub(crate) fn whole(self) -> Self {
        match self {
            Argument::Parameter(_) => self,
            Argument::Within { parameter, location, .. } => {
                Argument::Within { parameter, location, noun: "" }
            }
        }
    }

    /// Returns the parameter to which the argument belongs.
    pub(crate) fn parameter(self) -> &'a str {
        match self {
            Argument::Parameter(parameter) | Argument::Within { parameter, .. } => parameter,
        }
    }

    /// Returns a value of the argument for the middle of a sentence, with the name of the value: `offset=3` or `offset 3`.
    pub(crate) fn named(self, value: impl Display) -> String {
        match self {
            Argument::Parameter(name) => format!("{name}={value}"),
            Argument::Within { noun: "", .. } => value.to_string(),
            Argument::Within { noun, .. } => format!("{noun} {value}"),
        }
    }

    /// Returns a value of the argument for the middle of a sentence that says what the value is: `length=3` or `3`.
    pub(crate) fn plain(self, value: impl Display) -> String {
        self.whole().named(value)
    }

    /// Returns a value of the argument for the middle of a sentence about another argument: `dst_tokens=0..3` or `0..3 of dst`.
    pub(crate) fn elsewhere(self, value: impl Display) -> String {
        match self {
            Argument::Parameter(name) => format!("{name}={value}"),
            Argument::Within { location, .. } => format!("{value} of {location}"),
        }
    }

    /// Returns the error for a value that must be something else.
    #[cold]
    pub(crate) fn must_be(self, value: impl Display, required: impl Display) -> Error {
        self.error(value, format_args!("must be {required}"))
    }

    /// Returns the error for a value outside its `range`, for example "1 to 256".
    #[cold]
    pub(crate) fn out_of_range(self, value: impl Display, range: impl Display) -> Error {
        self.error(value, format_args!("is out of range ({range})"))
    }

    /// Returns the error for entry `at` of a list, which is outside its `range`.
    #[cold]
    pub(crate) fn entry_out_of_range(self, at: usize, value: impl Display, range: impl Display) -> Error {
        match self {
            Argument::Parameter(name) => {
                Argument::Parameter(&format!("{name}[{at}]")).out_of_range(value, range)
            }
            Argument::Within { .. } => self.out_of_range(value, range),
        }
    }

    fn error(self, value: impl Display, why: impl Display) -> Error {
        let value = self.named(value);
        let text = match self {
            Argument::Parameter(_) => format!("{value} {why}"),
            Argument::Within { location, .. } => format!("{location}: {value} {why}"),
        };
        Error::invalid(text).of_argument(self.parameter())
    }
}

impl Display for Argument<'_> {
    /// Writes the argument without a value, for sentences about several arguments.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Argument::Parameter(name) => f.write_str(name),
            Argument::Within { location, .. } => f.write_str(location),
        }
    }
}

impl<'a> From<&'a str> for Argument<'a> {
    fn from(parameter: &'a str) -> Self {
        Argument::Parameter(parameter)
    }
}

/// The words of an API for copies and transfers.
#[derive(Debug)]
pub struct Words {
    /// The side that is read.
    pub src: SideWords,
    /// The side that is written.
    pub dst: SideWords,
    /// Number of tensors in one layer.
    pub tensors_per_layer: Argument<'static>,
    /// Number of tensors of a cache.
    pub num_tensors: &'static str,
    /// What a list of blocks has.
    pub entries: &'static str,
    /// The tensors of the local cache that a pull writes.
    pub written_range: &'static str,
    /// Why peers may not use a cache.
    pub not_accessible: &'static str,
}

/// The words for one side of a copy or transfer.
#[derive(Debug)]
pub struct SideWords {
    /// The cache, as a parameter.
    pub cache: &'static str,
    /// The same if the call names only one cache of this engine.
    pub one_cache: &'static str,
    /// The cache if it is of this engine and the other one is not.
    pub local: &'static str,
    /// The cache of a peer.
    pub remote: &'static str,
    /// The list of blocks of a transfer.
    pub blocks: Argument<'static>,
    /// A block of a pair of a copy.
    pub block: Argument<'static>,
    /// The range of layers.
    pub layers: Argument<'static>,
    /// The tensors that move, which follow from the layers.
    pub tensors: Argument<'static>,
    /// The range of tokens.
    pub tokens: Argument<'static>,
    /// Bytes from the start of every row to the part that moves.
    pub offset: Argument<'static>,
    /// Bytes of the part that moves.
    pub length: Argument<'static>,
}

impl Words {
    /// The words of the original's API.
    pub const ORIGINAL: &'static Words = &Words {
        src: SideWords {
            cache: "src_cache",
            one_cache: "src_cache",
            local: "the local cache",
            remote: "the remote cache",
            blocks: Argument::Parameter("src_blocks"),
            block: Argument::Parameter("source block"),
            layers: Argument::Parameter("src_layer_range"),
            tensors: Argument::Parameter("src_layer_range"),
            tokens: Argument::Parameter("src_tokens"),
            offset: Argument::Parameter("src_offset"),
            length: Argument::Parameter("length"),
        },
        dst: SideWords {
            cache: "dst_cache",
            one_cache: "cache",
            local: "the local cache",
            remote: "the remote cache",
            blocks: Argument::Parameter("dst_blocks"),
            block: Argument::Parameter("destination block"),
            layers: Argument::Parameter("dst_layer_range"),
            tensors: Argument::Parameter("dst_layer_range"),
            tokens: Argument::Parameter("dst_tokens"),
            offset: Argument::Parameter("dst_offset"),
            length: Argument::Parameter("length"),
        },
        tensors_per_layer: Argument::Parameter("tensor_num_per_layer"),
        num_tensors: "num_tensors",
        entries: "entries",
        written_range: "the local range",
        not_accessible: "was registered with remote_accessible False",
    };

    /// The words of the native API, whose two sides are objects that name a cache, its blocks and the part of them.
    pub const NATIVE: &'static Words = &Words {
        src: SideWords {
            cache: "src",
            one_cache: "src",
            local: "src",
            remote: "src",
            blocks: Argument::Within { parameter: "src", location: "src", noun: "block" },
            block: Argument::Within { parameter: "src", location: "src", noun: "block" },
            layers: Argument::Within { parameter: "src", location: "the layer range of src", noun: "" },
            tensors: Argument::Within { parameter: "src", location: "src", noun: "" },
            tokens: Argument::Within { parameter: "src", location: "src", noun: "tokens" },
            offset: Argument::Within { parameter: "src", location: "src", noun: "byte offset" },
            length: Argument::Within { parameter: "src", location: "src", noun: "length" },
        },
        dst: SideWords {
            cache: "dst",
            one_cache: "dst",
            local: "dst",
            remote: "dst",
            blocks: Argument::Within { parameter: "dst", location: "dst", noun: "block" },
            block: Argument::Within { parameter: "dst", location: "dst", noun: "block" },
            layers: Argument::Within { parameter: "dst", location: "the layer range of dst", noun: "" },
            tensors: Argument::Within { parameter: "dst", location: "dst", noun: "" },
            tokens: Argument::Within { parameter: "dst", location: "dst", noun: "tokens" },
            offset: Argument::Within { parameter: "dst", location: "dst", noun: "byte offset" },
            length: Argument::Within { parameter: "dst", location: "dst", noun: "length" },
        },
        tensors_per_layer: Argument::Parameter("tensors_per_layer"),
        num_tensors: "tensors",
        entries: "blocks",
        written_range: "the range of dst",
        not_accessible: "was registered as not shared",
    };

    /// Returns the words of the source, and those of the destination.
    pub(crate) fn sides(&self) -> (&SideWords, &SideWords) {
        (&self.src, &self.dst)
    }
}
