//! Error codes of EC2 and their classes.

use kiyot_engine::provider::ErrorClass;

use crate::{CallError, Failure};

/// Offerings of a launch that an error refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// No offering.
    None,
    /// The requested offering.
    Offering,
    /// All offerings of the type, unless the request is wrong: account or image do not allow the
    /// type.
    Type,
    /// All offerings in the zone.
    Zone,
    /// All offerings of the market.
    Market,
    /// All offerings of the market whose types share a quota of virtual CPUs. Each market of a
    /// region has its own quotas.
    Quota,
    /// All offerings: a quota of the region that every launch needs.
    All,
}

/// The code of an account's first spot launch if the credentials can't create the role for spot
/// instances.
pub(super) const SERVICE_LINKED_ROLE: &str = "AuthFailure.ServiceLinkedRoleCreationNotPermitted";

/// The error codes by class. EC2's API reference describes them ("Error codes for the Amazon EC2
/// API"). An unknown code of a client error is `Invalid`; an unknown code of a server error means
/// that the outcome is unknown.
#[rustfmt::skip]
const CODES: [(&str, ErrorClass, Refused); 90] = [
    ("EncryptedVolumesNotSupported", ErrorClass::Capacity, Refused::Offering),
    ("InsufficientCapacity", ErrorClass::Capacity, Refused::Offering),
    ("InsufficientHostCapacity", ErrorClass::Capacity, Refused::Offering),
    ("InsufficientInstanceCapacity", ErrorClass::Capacity, Refused::Offering),
    ("InsufficientReservedInstanceCapacity", ErrorClass::Capacity, Refused::Offering),
    ("SpotMaxPriceTooLow", ErrorClass::Capacity, Refused::Offering),
    ("UnfulfillableCapacity", ErrorClass::Capacity, Refused::Offering),
    ("Unsupported", ErrorClass::Capacity, Refused::Offering),
    ("InsufficientAddressCapacity", ErrorClass::Capacity, Refused::Zone),
    ("InsufficientFreeAddressesInSubnet", ErrorClass::Capacity, Refused::Zone),
    ("InsufficientVolumeCapacity", ErrorClass::Capacity, Refused::Zone),
    ("VolumeTypeNotAvailableInZone", ErrorClass::Capacity, Refused::Zone),
    ("MaxSpotInstanceCountExceeded", ErrorClass::Capacity, Refused::Quota),
    (SERVICE_LINKED_ROLE, ErrorClass::Capacity, Refused::Market),
    ("EC2ThrottledException", ErrorClass::Throttled, Refused::None),
    ("RequestLimitExceeded", ErrorClass::Throttled, Refused::None),
    ("RequestThrottled", ErrorClass::Throttled, Refused::None),
    ("RequestThrottledException", ErrorClass::Throttled, Refused::None),
    ("SlowDown", ErrorClass::Throttled, Refused::None),
    ("Throttling", ErrorClass::Throttled, Refused::None),
    ("ThrottlingException", ErrorClass::Throttled, Refused::None),
    ("TooManyRequestsException", ErrorClass::Throttled, Refused::None),
    ("VcpuLimitExceeded", ErrorClass::Quota, Refused::Quota),
    ("InstanceLimitExceeded", ErrorClass::Quota, Refused::Market),
    ("AddressLimitExceeded", ErrorClass::Quota, Refused::All),
    ("MaxIOPSLimitExceeded", ErrorClass::Quota, Refused::All),
    ("NetworkInterfaceLimitExceeded", ErrorClass::Quota, Refused::All),
    ("PendingVerification", ErrorClass::Quota, Refused::All),
    ("PrivateIpAddressLimitExceeded", ErrorClass::Quota, Refused::All),
    ("ResourceCountExceeded", ErrorClass::Quota, Refused::All),
    ("VolumeLimitExceeded", ErrorClass::Quota, Refused::All),
    ("RouteLimitExceeded", ErrorClass::Quota, Refused::None),
    ("AccessDenied", ErrorClass::Auth, Refused::None),
    ("AccessDeniedException", ErrorClass::Auth, Refused::None),
    ("AuthFailure", ErrorClass::Auth, Refused::None),
    ("Blocked", ErrorClass::Auth, Refused::None),
    ("ExpiredToken", ErrorClass::Auth, Refused::None),
    ("ExpiredTokenException", ErrorClass::Auth, Refused::None),
    ("IncompleteSignature", ErrorClass::Auth, Refused::None),
    ("InvalidClientTokenId", ErrorClass::Auth, Refused::None),
    ("MissingAuthenticationToken", ErrorClass::Auth, Refused::None),
    ("OptInRequired", ErrorClass::Auth, Refused::None),
    ("RequestExpired", ErrorClass::Auth, Refused::None),
    ("SignatureDoesNotMatch", ErrorClass::Auth, Refused::None),
    ("UnauthorizedOperation", ErrorClass::Auth, Refused::None),
    ("UnrecognizedClientException", ErrorClass::Auth, Refused::None),
    ("CustomerKeyHasBeenRevoked", ErrorClass::Invalid, Refused::None),
    ("IdempotentParameterMismatch", ErrorClass::Invalid, Refused::None),
    ("InvalidAMIID.Malformed", ErrorClass::Invalid, Refused::None),
    ("InvalidAMIID.NotFound", ErrorClass::Invalid, Refused::None),
    ("InvalidAMIID.Unavailable", ErrorClass::Invalid, Refused::None),
    ("InvalidBlockDeviceMapping", ErrorClass::Invalid, Refused::None),
    ("InvalidGroup.NotFound", ErrorClass::Invalid, Refused::None),
    ("InvalidIamInstanceProfileArn.Malformed", ErrorClass::Invalid, Refused::None),
    ("InvalidInstanceID.Malformed", ErrorClass::Invalid, Refused::None),
    ("InvalidInstanceType", ErrorClass::Invalid, Refused::None),
    ("InvalidInterface.IpAddressLimitExceeded", ErrorClass::Invalid, Refused::None),
    ("InvalidKMSKey.InvalidState", ErrorClass::Invalid, Refused::None),
    ("InvalidKeyPair.NotFound", ErrorClass::Invalid, Refused::None),
    ("InvalidParameter", ErrorClass::Invalid, Refused::None),
    ("InvalidParameterCombination", ErrorClass::Invalid, Refused::Type),
    ("InvalidParameterValue", ErrorClass::Invalid, Refused::Type),
    ("InvalidSecurityGroupID.NotFound", ErrorClass::Invalid, Refused::None),
    ("InvalidSnapshot.NotFound", ErrorClass::Invalid, Refused::None),
    ("InvalidSubnet", ErrorClass::Invalid, Refused::None),
    ("InvalidSubnetID.NotFound", ErrorClass::Invalid, Refused::None),
    ("InvalidTagKey.Malformed", ErrorClass::Invalid, Refused::None),
    ("InvalidUserData.Malformed", ErrorClass::Invalid, Refused::None),
    ("InvalidVolume.ZoneMismatch", ErrorClass::Invalid, Refused::None),
    ("MissingParameter", ErrorClass::Invalid, Refused::None),
    ("OperationNotPermitted", ErrorClass::Invalid, Refused::None),
    ("SecurityGroupLimitExceeded", ErrorClass::Invalid, Refused::None),
    ("SecurityGroupsPerInstanceLimitExceeded", ErrorClass::Invalid, Refused::None),
    ("SecurityGroupsPerInterfaceLimitExceeded", ErrorClass::Invalid, Refused::None),
    ("TagLimitExceeded", ErrorClass::Invalid, Refused::None),
    ("UnknownParameter", ErrorClass::Invalid, Refused::None),
    ("UnsupportedOperation", ErrorClass::Invalid, Refused::Type),
    ("VPCIdNotSpecified", ErrorClass::Invalid, Refused::None),
    ("InvalidInstanceID", ErrorClass::NotFound, Refused::None),
    ("InvalidInstanceID.NotFound", ErrorClass::NotFound, Refused::None),
    ("IdempotentInstanceTerminated", ErrorClass::Ended, Refused::None),
    ("IncorrectInstanceState", ErrorClass::Transient, Refused::None),
    ("PriorRequestNotComplete", ErrorClass::Transient, Refused::None),
    ("RouteAlreadyExists", ErrorClass::Transient, Refused::None),
    ("InternalError", ErrorClass::Unanswered, Refused::None),
    ("InternalFailure", ErrorClass::Unanswered, Refused::None),
    ("InternalServerError", ErrorClass::Unanswered, Refused::None),
    ("ServerInternal", ErrorClass::Unanswered, Refused::None),
    ("ServiceUnavailable", ErrorClass::Unanswered, Refused::None),
    ("Unavailable", ErrorClass::Unanswered, Refused::None),
];

/// Returns whether a smaller volume may avoid the error with this code.
pub(super) fn depends_on_volume(code: &str) -> bool {
    matches!(code, "InsufficientVolumeCapacity" | "MaxIOPSLimitExceeded" | "VolumeLimitExceeded")
}

/// Returns whether the code means that a launch's image no longer exists, or not yet.
pub(super) fn lacks_image(code: &str) -> bool {
    matches!(code, "InvalidAMIID.NotFound" | "InvalidAMIID.Unavailable")
}

/// Returns whether the reason of an instance's end (`StateReason`) is a lack of capacity.
pub(super) fn lacks_capacity(code: &str) -> bool {
    matches!(
        code,
        "Server.InsufficientInstanceCapacity"
            | "Server.SpotInstanceShutdown"
            | "Server.SpotInstanceTermination"
    )
}

/// Returns the usual cause of an instance's end (`StateReason`), if EC2's message does not name it.
pub(super) fn usual_cause(code: &str) -> Option<&'static str> {
    (code == "Client.InternalError")
        .then_some("usually rights are missing on the KMS key of a volume (docs/ec2.md)")
}

/// Returns the class of an error, and the offerings that it refuses.
pub(super) fn classify(error: &CallError) -> (ErrorClass, Refused) {
    let known = error.code().and_then(|code| CODES.iter().find(|(known, ..)| *known == code));
    if let Some((_, class, refused)) = known {
        return (*class, *refused);
    }
    let class = match &error.failure {
        Failure::Refused { .. } => ErrorClass::Invalid,
        Failure::NotSent(_) => ErrorClass::Transient,
        Failure::Failed { .. }
        | Failure::Unanswered(_)
        | Failure::TooSlow(_)
        | Failure::Incomplete(_) => ErrorClass::Unanswered,
    };
    (class, Refused::None)
}

#[cfg(test)]
mod tests;
