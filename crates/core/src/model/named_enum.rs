//! Enums without fields whose variants have names.

/// Defines an enum whose variants have the names that programs and reports use.
macro_rules! named_enum {
    ($(#[$attribute:meta])* pub enum $type:ident { $($(#[$doc:meta])* $variant:ident = $name:literal,)* }) => {
        $(#[$attribute])*
        pub enum $type { $($(#[$doc])* $variant,)* }

        impl $type {
            /// All of them, in their order.
            pub const ALL: [$type; [$($name),*].len()] = [$($type::$variant,)*];

            /// Returns its name.
            pub const fn name(self) -> &'static str {
                match self { $($type::$variant => $name,)* }
            }
        }
    };
}

pub(crate) use named_enum;
