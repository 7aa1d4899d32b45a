{{/* The operator's settings: EVERGRAD_SOME_NAME is its option --some-name. */}}
{{- define "evergrad.environment" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
{{- $runs := .Values.runs }}
{{- $settings := dict
  "LEASE_NAME" (include "evergrad.fullname" .)
  "KEY_NAME" (include "evergrad.keyName" .)
  "LEASE_SECONDS" .Values.operator.leaseSeconds
  "LOG_LEVEL" .Values.operator.logLevel
  "LOG_FORMAT" .Values.operator.logFormat
  "WORKERS" .Values.operator.workers
  "IN_FLIGHT" .Values.operator.inFlight
  "RESYNC_SECONDS" .Values.operator.resyncSeconds
  "POLL_SECONDS" .Values.operator.pollSeconds
  "PAGE_PORT" (ternary 0 .Values.operator.pagePort .Values.hostNetwork)
  "PORT" .Values.operator.port
  "LEASE" .Values.operator.leaderElection
  "OPERATOR_IMAGE" (include "evergrad.image" (dict "image" .Values.image "version" .Chart.AppVersion))
  "TRAINER_IMAGE" (include "evergrad.image" (dict "image" .Values.trainer.image "version" .Chart.AppVersion))
  "IMAGE_PULL_POLICY" .Values.trainer.image.pullPolicy
  "OPERATOR_IMAGE_PULL_POLICY" .Values.image.pullPolicy
  "NETWORK_POLICIES" $runs.networkPolicies
  "DISRUPTION_BUDGETS" $runs.disruptionBudgets
  "GANG" $runs.gang
  "DEFAULT_STORAGE_SIZE" $runs.storage.size
  "STORAGE_ACCESS_MODE" $runs.storage.accessMode
  "SCRATCH_SIZE" ($runs.scratchSize | default "")
  "NODE_LOSS_TOLERATION_SECONDS" $runs.nodeLossTolerationSeconds
  "USER_ID" $runs.userId
  "GROUP_ID" $runs.groupId
  "COORDINATOR_CPU" $runs.coordinator.cpu
  "COORDINATOR_MEMORY" $runs.coordinator.memory
  "COORDINATOR_MEMORY_LIMIT" $runs.coordinator.memoryLimit
  "PRICE_GPU_HOUR" $runs.price.gpuHour
  "PRICE_POD_HOUR" $runs.price.podHour
}}
{{- if include "evergrad.webhook" . }}
{{- $_ := set $settings "WEBHOOK" true }}
{{- $_ := set $settings "WEBHOOK_PORT" .Values.webhook.port }}
{{- $_ := set $settings "WEBHOOK_SERVICE" (include "evergrad.fullname" .) }}
{{- if .Values.webhook.certManager.enabled }}
{{- $_ := set $settings "WEBHOOK_FILES" "/etc/evergrad/webhook" }}
{{- else }}
{{- $_ := set $settings "WEBHOOK_SECRET" (include "evergrad.webhookSecret" .) }}
{{- $_ := set $settings "WEBHOOK_EARLY" .Values.webhook.early }}
{{- $_ := set $settings "WEBHOOK_CONFIGURATION" (include "evergrad.clusterName" .) }}
{{- end }}
{{- end }}
{{- if eq .Values.rbac.scope "cluster" }}
{{- $_ := set $settings "ALL_NAMESPACES" true }}
{{- else }}
{{- $_ := set $settings "NAMESPACE" (include "evergrad.namespaces" . | fromJsonArray | join ",") }}
{{- end }}
{{- if $runs.profiles }}{{/* doubled, because the kubelet would replace $(NAME) in a value */}}
{{- $_ := set $settings "PROFILES" (toJson $runs.profiles | replace "$" "$$") }}
{{- end }}
{{- if $runs.imagePullSecrets }}
{{- $_ := set $settings "IMAGE_PULL_SECRETS" (join "," $runs.imagePullSecrets) }}
{{- end }}
{{- if $runs.metricsFrom }}
{{- $_ := set $settings "METRICS_FROM" (join "," $runs.metricsFrom) }}
{{- end }}
{{- if .Values.metrics.annotations }}
{{- $_ := set $settings "SCRAPE_ANNOTATIONS" true }}
{{- end }}
{{- with ($runs.allowed | default dict).serviceAccountNames }}
{{- $_ := set $settings "ALLOWED_SERVICE_ACCOUNTS" (join "," .) }}
{{- end }}
{{- if .Values.admissionPolicy.enabled }}{{/* the operator holds profiles to the same lists */}}
{{- with .Values.admissionPolicy.allowedImages }}
{{- $_ := set $settings "ALLOWED_IMAGES" (join "," .) }}
{{- end }}
{{- with .Values.admissionPolicy.allowedPriorityClasses }}
{{- $_ := set $settings "ALLOWED_PRIORITY_CLASSES" (join "," .) }}
{{- end }}
{{- end }}
{{- if ($runs.allowed | default dict).deletion }}
{{- $_ := set $settings "ALLOW_RUN_DELETION" true }}
{{- end }}
{{- range $kind, $bounds := $runs.ephemeralStorage }}
{{- with $bounds.request }}
{{- $_ := set $settings (printf "%s_EPHEMERAL_STORAGE" (upper $kind)) . }}
{{- end }}
{{- with $bounds.limit }}
{{- $_ := set $settings (printf "%s_EPHEMERAL_STORAGE_LIMIT" (upper $kind)) . }}
{{- end }}
{{- end }}
{{- if $runs.labels.propagate }}
{{- $_ := set $settings "PROPAGATED_LABELS" (join "," $runs.labels.propagate) }}
{{- end }}
{{- if $runs.price.currency }}
{{- $_ := set $settings "PRICE_CURRENCY" $runs.price.currency }}
{{- end }}
{{- if $runs.storage.storageClassName }}
{{- $_ := set $settings "DEFAULT_STORAGE_CLASS" $runs.storage.storageClassName }}
{{- end }}
{{- if $runs.sharedMemorySize }}
{{- $_ := set $settings "SHARED_MEMORY_SIZE" $runs.sharedMemorySize }}
{{- end }}
{{- if $runs.schedulerName }}
{{- $_ := set $settings "SCHEDULER_NAME" $runs.schedulerName }}
{{- end }}
{{- if $runs.clusterDomain }}
{{- $_ := set $settings "CLUSTER_DOMAIN" $runs.clusterDomain }}
{{- end }}
{{- range $name, $value := $settings }}
{{- if not (kindIs "invalid" $value) }}{{/* null leaves a setting to the operator's default */}}
{{- if and (kindIs "float64" $value) (eq $value (floor $value)) }}{{/* numbers of a file are floats: 2592000 would be 2.592e+06 */}}
{{- $value = int64 $value }}
{{- end }}
- name: EVERGRAD_{{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}
{{- end -}}
