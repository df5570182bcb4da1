//! How thoroughly a call checks the bytes that it has moved.

/// How thoroughly a call checks the bytes that it has moved against those of the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Not at all.
    #[default]
    Off,
    /// One block in 64, chosen at random, and at least one.
    Sample,
    /// Every block.
    Full,
}
